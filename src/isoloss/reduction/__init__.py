"""Denominators, records and gradients: everything that is summed over ranks."""

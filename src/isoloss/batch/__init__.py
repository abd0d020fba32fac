"""What a batch contains: layouts, targets, weights, packing."""

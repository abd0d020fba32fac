"""Objectives turn model outputs into per-token or per-document losses; they own no loop."""

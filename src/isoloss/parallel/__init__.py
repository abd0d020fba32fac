"""How a model runs over the ranks: attention by document, wrapping."""

"""The paged key-value cache: blocks, block tables and tensors."""

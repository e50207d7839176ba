"""Sparse attention whose Full layers select keys and whose Shared layers reuse the selection (IndexShare)."""

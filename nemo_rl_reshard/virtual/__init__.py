"""Sides that exist on paper only, pure Python: a model's tensors laid out as a trainer or an engine would hold them."""

"""What travels, pure Python: tensors, shards, manifests, their routes and the reasons for them."""

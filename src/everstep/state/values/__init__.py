"""Values: tensors, plain Python objects and nested containers as bytes. Never pickle."""

"""The real engine: processes over torch.distributed."""

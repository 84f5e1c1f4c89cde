"""Training one network in several processes, by torch.distributed."""

"""One network in several processes, by torch.distributed: what ranks do together."""

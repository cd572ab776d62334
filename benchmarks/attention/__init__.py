"""Speed and memory of attention, forward, backward and decoding, beside its peers."""

"""What models hardware that is not here: schedules of TPU kernels, and a sequence of a million tokens."""

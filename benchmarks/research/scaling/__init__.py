"""What would attention to a million tokens cost on 8 to 256 chips?

    python -m benchmarks.research.scaling

Nobody who wrote this has had so many chips. So time and bytes of one attention layer are modelled, from what is known
of its parts: how many key blocks each chip computes and how many bytes it sends follow from the plan of the heads'
horizons; what a block costs is read from the schedules that the TPU's compiler writes
(`benchmarks.research.tpu_static`); clocks and bandwidths are published. All inputs are in
one table, which is printed first.

The model is held against what can be measured here, and the exit status is 1 if it is off by more than a quarter, or
in bytes at all:

  programs  compiled for 16 and for 256 chips, at the full length: bytes sent, and temporaries;
  blocks    of keys, against those that the kernel's own plan visits for random data on one chip;
  time      of processes that share a sequence on this machine, predicted from the time of one thread at another length
            and the bandwidth between two processes.

What the model leaves out: waiting for memory inside a kernel that its bandwidth would allow, the start of programs, and
work that other devices wait for. Of our layer nothing overlaps. The full ring that it is compared with (each chip's
keys and values visit all others; causal work evenly divided; splash attention's schedules) overlaps all it sends with
all it computes. So the ratio is rather understated than overstated.

GPUs are left out, until our kernels have been measured on one.
"""

"""Does the backend "dlab" do what PyTorch asks of a backend? PyTorch's own distributed tests, on gloo and on dlab.

`make conformance` runs the whole of `torch.testing._internal.distributed.distributed_test` twice and prints both
columns; `tests/test_conformance.py` runs a choice. In both every rank is a real process, there are four of them, and
torch's own assertions decide.

What a backend is responsible for: every test that gloo passes. They are of collectives, point to point, barriers and
their timeouts, groups, works and futures, and of DDP on CPU models, which needs all of these. Where the suite asks for
gloo by name, dlab is taken for gloo, so that the test runs.

What it is not responsible for, and why it cannot count against dlab:

- tests on CUDA tensors, of NCCL, and those that torch has switched off: gloo skips them here as well;
- tests of DDP's bucket sizes: they run without any backend, and pass;
- `dist.monitored_barrier` (see `table.EXEMPT`): torch.distributed refuses it to every backend but gloo, before it
  asks the group. dlab's group has one, and the test that calls it passes;
- profiler events: the suite looks for them only on backends that are on its list, and dlab is not.

The rule, then, needs no list of collectives: what gloo passes and dlab does not is a fault, unless `EXEMPT` says why.
"""

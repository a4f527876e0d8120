"""Workers train without importing torch's compiler, and get the real one when they compile."""

import sys

import pytest
import torch


def _stand_in() -> bool:
    return type(sys.modules["torch._dynamo"]).__name__ == "_StandIn"


def _train(optimizer_class):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = optimizer_class([parameter], lr=0.1)
    parameter.sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    return parameter.detach(), _stand_in()


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_optimizers_work_as_in_plain_torch_and_import_no_compiler(cluster, optimizer_class):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = optimizer_class([parameter], lr=0.1)
    parameter.sum().backward()
    optimizer.step()
    for found, stand_in in cluster.run(_train, optimizer_class):
        assert torch.equal(found, parameter.detach())
        assert stand_in


def _compile():
    double = torch.compile(lambda x: x * 2, backend="eager")
    return double(torch.ones(2)), _stand_in(), torch._dynamo.config.suppress_errors, _train(torch.optim.SGD)[0]


def test_torch_compile_in_a_worker_brings_the_real_compiler(cluster):
    for doubled, stand_in, setting, trained in cluster.run(_compile):
        assert torch.equal(doubled, torch.full((2,), 2.0))
        assert not stand_in
        assert setting is False
        assert torch.equal(trained, torch.full((3,), 1.0) - 0.1)

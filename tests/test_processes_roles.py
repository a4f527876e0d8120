"""Roles: what the servers of a cluster do is up to the package that registers it."""

import ast
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import cloudpickle
import pytest

import dlab
from dlab.memory.mapping import map_file, new_file
from dlab.processes.between import roles
from dlab.processes.worker import context

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import pytest

TOP = Path(dlab.__file__).parent


class Page:
    """The memory of a role of this test: a name, and at its end whether the workers have returned."""

    def __init__(self, workers, servers, file=None):
        self.file = new_file("test-page", 4096) if file is None else file

    def clear(self):
        os.truncate(self.file, 0)
        os.truncate(self.file, 4096)

    def map(self):
        return map_file(self.file, 4096)

    def end(self):
        self.map()[-1] = 1


def play(function, args, kwargs):
    """Write down what the workers call, until they have returned."""
    page = context.servers().desk.map()
    page[:6] = f"{function.__name__}{args[0]}".encode()
    while not page[-1]:
        time.sleep(0.001)


def read(number):
    page, until = context.servers().desk.map(), time.monotonic() + 20
    while not page[0] and time.monotonic() < until:
        time.sleep(0.001)
    return bytes(page[:6])


def test_servers_do_what_the_registered_role_says_and_workers_see_its_memory(monkeypatch):
    monkeypatch.setitem(roles._roles, "server", roles.Role(Page, play, __file__))
    with dlab.Cluster(2, servers=1) as cluster:
        for number in (10, 11):  # a clean page in each run
            assert cluster.run(read, number, timeout=30) == [f"read{number}".encode()] * 2
    assert __file__ in roles.modules()


def test_a_role_that_nobody_has_registered_is_loaded_from_where_it_is_offered(monkeypatch):
    monkeypatch.setattr(roles, "_roles", {})
    monkeypatch.setattr(roles, "_offers", {})
    role = roles.Role(Page, play, __file__)
    roles.offer("painter", lambda: roles.register("painter", role))
    assert roles.modules() == set()
    assert roles.find("painter") is role
    with pytest.raises(LookupError, match="there is no role 'gardener'"):
        roles.find("gardener")


def test_key_value_servers_register_themselves_when_a_cluster_needs_them():
    script = """
import sys, dlab
from dlab.processes.between import roles
dlab.Cluster, dlab.events
print("dlab.kvstore" in sys.modules, roles.modules() != set())
roles.find("server")
print("dlab.kvstore" in sys.modules, roles.modules() != set())
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert said.stdout.split() == ["False", "False", "True", "True"], said.stderr


def test_a_role_is_sent_by_reference():
    role = roles.find("server")
    sent = pickle.dumps(role)
    assert pickle.loads(sent) == role and b"dlab.kvstore.serving" in sent


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_client_imports_from_the_servers_module():
    users = [path for path in TOP.rglob("*.py") if "dlab.kvstore.server" in imports(path)]
    assert users == [TOP / "kvstore" / "serving.py"]
    clients = [TOP / "kvstore" / f"{name}.py" for name in ("distributed", "failover", "joining", "store", "locked")]
    for path in [*clients, *(TOP / "strategies").glob("*.py")]:
        assert "dlab.kvstore.serving" not in imports(path), path


def test_processes_name_no_package_of_servers():
    for path in (TOP / "processes").rglob("*.py"):
        names = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        assert not [name for name in names if isinstance(name, str) and name.startswith("dlab.kvstore")], path

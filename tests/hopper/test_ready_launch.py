"""Launches kept ready: the driver's launcher gets from them what Triton's own way gives it, with the launcher and the encoding of descriptors stood in for."""
from __future__ import annotations

from types import SimpleNamespace

import pytest

launch = pytest.importorskip("mok.engines.hopper.launch", reason="needs Triton with Gluon")
backward_launch = pytest.importorskip("mok.engines.hopper.backward_launch")
plan_kernel = pytest.importorskip("mok.engines.hopper.plan_kernel")

import triton  # noqa: E402
from triton.backends.nvidia import driver as nvidia  # noqa: E402

from mok.engines.hopper.compat import current_stream, ready_launch  # noqa: E402


class Compiled:
    """In a compiled function's place: not a Python function, as the launchers are not."""

    def __init__(self, result):
        self.result, self.calls = result, []

    def __call__(self, *arguments):
        self.calls.append(arguments)
        return self.result(*arguments)


@pytest.fixture
def machine(monkeypatch):
    """Triton's NVIDIA launcher, as this release has it, without a GPU: .launches and .encoded are what reached the driver."""
    launcher = Compiled(lambda *arguments: None)
    encode = Compiled(lambda *arguments: ("encoded", *map(repr, arguments)))
    utils = SimpleNamespace(launch=launcher, fill_tma_descriptor=encode, fill_tma_descriptor_tiled=encode, build_signature_metadata=lambda kinds: bytes(len(kinds)))
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=utils, get_current_stream=lambda index: 40 + index))
    monkeypatch.setattr(nvidia, "compile_module_from_src", lambda **source: SimpleNamespace(launch=launcher), raising=False)   # 3.6: a launcher each
    monkeypatch.setattr(nvidia, "library_dirs", lambda: [])
    monkeypatch.setattr(nvidia, "PyKernelArg", lambda **parts: parts, raising=False)                                          # 3.9: one for all
    return SimpleNamespace(launches=launcher.calls, encoded=encode.calls)


def binary(source, **metadata):
    """A compiled kernel as far as launching goes."""
    descriptors = [kind for kind in source.signature.values() if kind.startswith("tensordesc")]
    encoding = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 64], "fp4_padded": False}
    facts = {"tensordesc_meta": [encoding] * len(descriptors), "num_ctas": 1, "global_scratch_size": 0, "global_scratch_align": 1, "profile_scratch_size": 0,
             "profile_scratch_align": 1, "launch_cooperative_grid": True, "launch_pdl": False, **metadata}
    return SimpleNamespace(run=nvidia.CudaLauncher(source, SimpleNamespace(**facts)), function=77, packed_metadata=(4, 1, 1000))


def arguments_of(source, first=1 << 20):
    """One of every kind that the signature names, all different; constant expressions included."""
    constants = {name[0] if isinstance(name, tuple) else name: value for name, value in source.constants.items()}
    values = []
    for i, (name, kind) in enumerate(source.signature.items()):
        if kind.startswith("tensordesc"):
            rank = kind.split("]")[0].count(",") + 1
            values.append(backward_launch._descriptor(first + 256 * i, tuple(range(i + 2, i + 2 + rank)), (*range(800 + 8 * i, 800 + 8 * (i + rank - 1), 8), 1)))
        else:
            values.append(constants.get(i, i) if kind == "constexpr" else 0.5 + i if kind == "fp32" else first + 16 * i)
    return values


def as_triton(kernel, blocks, stream, arguments):
    kernel.run(blocks, 1, 1, stream, kernel.function, kernel.packed_metadata, None, None, None, *arguments)


SOURCES = {"forward": (lambda: launch.source(launch.ForwardConfig(True)), ("state", "capacity")),
           "backward": (lambda: backward_launch.source(backward_launch.BackwardConfig(0)), ("state", "set_words")),
           "plan": (lambda: next(source for name, source, _ in plan_kernel.compile_sources() if "scatter" in name), ("topk_ids", "counts", "num_tiles"))}


@pytest.mark.parametrize("name", SOURCES)
def test_the_launcher_gets_what_triton_gives_it(machine, name):
    make, varying_names = SOURCES[name]
    source = make()
    kernel, names = binary(source), list(source.signature)
    varying = [names.index(each) for each in varying_names]
    arguments = arguments_of(source)
    ready = ready_launch(kernel, arguments, varying)
    assert ready is not None and not machine.launches
    descriptors = sum(kind.startswith("tensordesc") for kind in source.signature.values())
    assert len(machine.encoded) == descriptors and (descriptors > 0) == (name != "plan")
    for blocks, stream, values in ((7, 99, range(1000, 1000 + len(varying))), (8, 98, range(2000, 2000 + len(varying)))):
        machine.encoded.clear()
        ready(blocks, stream, *values)
        assert not machine.encoded, "a descriptor was encoded again"
        changed = list(arguments)
        for place, value in zip(varying, values):
            changed[place] = value
        as_triton(kernel, blocks, stream, changed)
        ours, theirs = machine.launches[-2:]
        flat = [[*call[:-1], *call[-1]] if isinstance(call[-1], (list, tuple)) else [*call] for call in (ours, theirs)]
        assert flat[0] == flat[1] and set(values) < set(map(id_or_value, flat[0]))
    assert arguments == arguments_of(source), "the caller's list was changed"


def id_or_value(value):
    return value if isinstance(value, (int, float, str)) else id(value)


def test_what_is_made_anew_for_each_launch_is_left_to_triton(machine):
    source = SOURCES["plan"][0]()
    assert ready_launch(binary(source, global_scratch_size=64), arguments_of(source), (0,)) is None
    assert ready_launch(binary(source, profile_scratch_size=64), arguments_of(source), (0,)) is None


def test_an_unknown_launcher_is_left_to_triton(machine):
    """Internals of a release to come: no `launch`, one that hides what it calls, one that calls with other arguments, or none."""
    source = SOURCES["forward"][0]()
    arguments = arguments_of(source)

    def replaced(launch_function):
        kernel = binary(source)
        if launch_function is None:
            del kernel.run.launch
        else:
            kernel.run.launch = launch_function
        return ready_launch(kernel, arguments, (1, 2))

    def calling(arrange):
        launcher = Compiled(lambda *call: None)
        return lambda *call: launcher(*arrange(call))

    assert replaced(calling(lambda call: call)) is not None, "this way of replacing it is no test"
    for odd in (None, lambda *call: None, calling(lambda call: call[1:]), calling(lambda call: (*call[:3], 5, *call[4:])),
                calling(lambda call: call[:8])):
        assert replaced(odd) is None
    assert not machine.launches


def test_the_current_stream_is_tritons(machine):
    assert current_stream(2) == 42

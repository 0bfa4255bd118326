"""The CPU engine against the float64 specification: shapes, dtypes, activations, rounding, frozen inputs, accumulators and hostile data."""
from __future__ import annotations

import itertools
from dataclasses import fields, replace

import pytest
import torch
from oracle import Case, check_case, differing, make_case, named, plain, run_engine, same_bits, want_all

from mok.engines import cpu_tiles
from mok.engines.cpu import CpuEngine
from mok.engines.protocol import MainGrad, PassOptions, Wants
from mok.runtime import runtime

ENGINE = CpuEngine()
DTYPES = [pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in (torch.bfloat16, torch.float32, torch.float64, torch.float16)]
SHARED = ((24, True), (7, False), (40, True))


@pytest.fixture(autouse=True)
def _unwritten_memory_is_nan():
    """Every `empty` and every buffer of earlier passes holds NaN, as memory that an earlier step used may."""
    for buffer in runtime.rows._free:
        buffer.fill_(255)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "H", "I", "E", "K"), [
    (300, 65, 33, 5, 3),        # odd sizes, tiles of 256 rows and smaller ones
    (64, 128, 64, 4, 2),        # 2I == H
    (40, 48, 48, 8, 2),         # I == H
    (8, 32, 16, 8, 2),          # T == E
    (33, 24, 16, 4, 4),         # K == E
    (1, 1, 1, 1, 1),            # everything is 1
    (700, 272, 136, 3, 2),      # several column tiles of the dot products, several row tiles of an expert
], ids=str)
def test_matches_the_specification(dtype, T, H, I, E, K):
    case = make_case(T, H, I, E, K, dtype, biases=True, shared=SHARED)
    check_case(case, run_engine(ENGINE, case))


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("T", [0, 1, 2, 31, 32, 33, 127, 128, 129, 255, 256, 257])
def test_every_token_count(dtype, T):
    """Tokens around the row tiles' sizes; all of them to one expert, so that its segment has exactly T rows."""
    case = make_case(T, 40, 24, 3, 1, dtype, biases=True, topk_ids=torch.full((T, 1), 1))
    got = run_engine(ENGINE, case)
    check_case(case, got)
    assert got["y"].shape == (T, 40) and got["x"].shape == (T, 40) and got["topk_weights"].shape == (T, 1)
    for name in ("w_gate_up", "w_down", "b_gate_up", "b_down"):
        empty = got[name][[0, 2]] if T else got[name]
        assert same_bits(empty, torch.zeros_like(empty)), name


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("ids", [
    torch.full((50, 3), -1),                                           # no route at all
    torch.tensor([[2, 2, 2], [0, 2, 2], [-1, 1, -1], [1, -1, 1]]).repeat(15, 1),     # repeated and missing experts
    torch.full((200, 4), 2),                                           # every route of every token to one expert
    torch.tensor([[3], [-1], [0]], dtype=torch.int32).repeat(20, 1),   # int32, one route
], ids=["none", "repeated", "one expert", "int32"])
def test_routes(dtype, ids):
    case = make_case(ids.shape[0], 56, 24, 4, ids.shape[1], dtype, biases=True, shared=((8, True),), topk_ids=ids)
    got = run_engine(ENGINE, case)
    check_case(case, got)
    assert same_bits(got["topk_weights"][ids < 0], torch.zeros_like(got["topk_weights"][ids < 0]))


def test_more_rows_than_one_chunk_of_a_weight_gradient():
    """2500 rows of one expert: three chunks, and three row tiles of a gradient wider than one output tile."""
    for dtype in (torch.float32, torch.bfloat16):
        case = make_case(2500, 40, 300, 2, 1, dtype, biases=True, topk_ids=torch.zeros(2500, 1, dtype=torch.int64))
        check_case(case, run_engine(ENGINE, case))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("activation", "limit"), [("swiglu", None), ("swiglu", 0.7), ("swiglu_oai", None), ("swiglu_oai", 0.7), ("geglu", None),
                                                   ("reglu", None)])
def test_activations(dtype, activation, limit):
    case = make_case(70, 48, 20, 3, 2, dtype, biases=True, shared=((12, False),), activation=activation, swiglu_limit=limit)
    if dtype in (torch.bfloat16, torch.float16) and limit is not None:
        # a z that rounds to the limit has the gradient of the limit, which no tolerance bridges: take data whose z is exact
        case = exact_preactivations(case, limit)
    check_case(case, run_engine(ENGINE, case))


def exact_preactivations(case: Case, limit: float) -> Case:
    """z = x on the first 2I columns: every row of w_gate_up picks one input, x holds multiples of limit / 4 rounded to the dtype."""
    t = case.tensors
    steps = torch.randint(-8, 9, t.x.shape, generator=torch.Generator().manual_seed(5))
    pick = torch.eye(t.w_gate_up.shape[1], t.x.shape[1], dtype=t.x.dtype).expand_as(t.w_gate_up).contiguous()
    shared = tuple(replace(s, w_gate_up=torch.eye(s.w_gate_up.shape[0], t.x.shape[1], dtype=t.x.dtype)) for s in t.shared)
    tensors = replace(t, x=(steps * (limit / 4)).to(t.x.dtype), w_gate_up=pick, b_gate_up=torch.zeros_like(t.b_gate_up), shared=shared)
    rounded_limit = float(torch.tensor(limit).to(t.x.dtype))
    return replace(case, tensors=tensors, options=replace(case.options, swiglu_limit=rounded_limit))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai"])
def test_gradient_at_the_clamps_boundary(dtype, activation):
    """g and u exactly at, just inside and just outside of the limit, each sign: the gradient passes at the boundary and stops beyond it."""
    limit = torch.tensor(1.5, dtype=dtype)
    up, down = (limit * (1 + 2 * torch.finfo(dtype).eps)).to(dtype), (limit * (1 - 2 * torch.finfo(dtype).eps)).to(dtype)
    values = torch.stack([limit, -limit, up, -up, down, -down, torch.zeros((), dtype=dtype)])
    x = torch.cartesian_prod(values, values)                                         # (49, 2): every pair of g and u
    case = make_case(49, 2, 1, 1, 1, dtype, activation=activation, swiglu_limit=1.5, topk_ids=torch.zeros(49, 1, dtype=torch.int64))
    case = replace(case, tensors=replace(case.tensors, x=x, w_gate_up=torch.eye(2, dtype=dtype).unsqueeze(0)))
    got, truth = run_engine(ENGINE, case), plain(case)
    check_case(case, got)
    assert torch.equal(got["x"] == 0, truth["x"] == 0) and 0 < int((got["x"] == 0).sum()) < got["x"].numel()


def small_integers(*shape: int, top: int, unit: float, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-top, top + 1, shape, generator=generator).double() * unit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_contract_to_the_bit(dtype):
    """Data on which every product and sum is exact before the roundings that the contract names: then no order matters, and each bit is known.

    reglu, because it is exact too. Expected values are computed in float64 with the contract's roundings written out.
    """
    generator = torch.Generator().manual_seed(0)
    T, H, I, E, K = 60, 24, 10, 3, 2
    ids = torch.randint(0, E, (T, K), generator=generator)
    x, dy = small_integers(T, H, top=7, unit=1.0, generator=generator), small_integers(T, H, top=1, unit=1.0, generator=generator)
    w13, w2 = (small_integers(*shape, top=3, unit=unit, generator=generator) for shape, unit in (((E, 2 * I, H), 0.25), ((E, H, I), 0.5)))
    b13, b2 = small_integers(E, 2 * I, top=9, unit=0.125, generator=generator), small_integers(E, H, top=9, unit=0.125, generator=generator)
    s13, s2 = small_integers(4, H, top=3, unit=0.25, generator=generator), small_integers(H, 2, top=3, unit=0.5, generator=generator)
    weights = torch.randint(1, 8, (T, K), generator=generator).double() / 8
    case = make_case(T, H, I, E, K, dtype, biases=True, shared=((2, False),), activation="reglu", topk_ids=ids)
    tensors = replace(case.tensors, x=x.to(dtype), topk_weights=weights.float(), w_gate_up=w13.to(dtype), w_down=w2.to(dtype),
                      b_gate_up=b13.to(dtype), b_down=b2.to(dtype), shared=(replace(case.tensors.shared[0], w_gate_up=s13.to(dtype), w_down=s2.to(dtype)),))
    case = replace(case, tensors=tensors, dy=dy.to(dtype))

    rounded_away = [0]

    def rnd(t):
        rounded_away[0] += int((t != t.to(dtype).double()).sum())
        return t.to(dtype).double()

    def exact32(t):
        assert torch.equal(t.float().double(), t), "the data must keep fp32 sums exact"
        return t

    def expert(rows, dy_rows, weight, gate_up, down, b_gate_up, b_down):
        z = rnd(exact32(rows @ gate_up.T + b_gate_up))
        g, u = z.chunk(2, 1)
        h = rnd(g.clamp(min=0) * u)
        y = rnd(exact32(h @ down.T + b_down))
        dh = exact32(dy_rows @ down)
        dz = rnd(exact32(torch.cat([weight * dh * u * (g > 0), weight * dh * g.clamp(min=0)], 1)))
        return {"y": y, "dx": rnd(exact32(dz @ gate_up)), "d_weight": exact32((dh * h).sum(1) + dy_rows @ b_down), "dw13": exact32(dz.T @ rows),
                "dw2": exact32(dy_rows.T @ rnd(weight * h)), "db13": exact32(dz.sum(0)), "db2": exact32((weight * dy_rows).sum(0))}

    y, dx = torch.zeros(T, H, dtype=torch.float64), torch.zeros(T, H, dtype=torch.float64)
    expected = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in named(tensors).items() if tensor is not None}
    parts = {}
    for e in range(E):
        t, k = torch.nonzero(ids == e, as_tuple=True)
        r = expert(x[t], dy[t], weights[t, k].unsqueeze(1), w13[e], w2[e], b13[e], b2[e])
        parts |= {(int(token), int(route)): (r["y"][i], r["dx"][i]) for i, (token, route) in enumerate(zip(t, k))}
        expected["topk_weights"][t, k] = r["d_weight"]
        for name, key in (("w_gate_up", "dw13"), ("w_down", "dw2"), ("b_gate_up", "db13"), ("b_down", "db2")):
            expected[name][e] = r[key]
    for token, k in itertools.product(range(T), range(K)):
        y[token] = (weights[token, k] * parts[token, k][0] + y[token]).float().double()
        dx[token] = (parts[token, k][1] + dx[token]).float().double()
    r = expert(x, dy, torch.ones(T, 1, dtype=torch.float64), s13, s2, torch.zeros(4, dtype=torch.float64), torch.zeros(H, dtype=torch.float64))
    expected |= {"y": rnd((y + r["y"]).float().double()), "x": rnd((dx + r["dx"]).float().double()), "shared0.w_gate_up": r["dw13"], "shared0.w_down": r["dw2"]}
    got = run_engine(ENGINE, case)
    assert rounded_away[0] > 1000, "the data must make the contract's roundings visible"
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor.to(got[name].dtype)), name


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_every_combination_of_wanted_gradients(dtype):
    """What is wanted has the bits of the run that wants everything; what is not is None."""
    case = make_case(90, 40, 24, 4, 2, dtype, biases=True, shared=((8, True), (12, False)))
    everything = run_engine(ENGINE, case)
    names = ("x", "topk_weights", "w_gate_up", "w_down", "b_gate_up", "b_down")
    for i, wanted in enumerate(itertools.product((False, True), repeat=6)):
        shared = tuple((bool(i & 1 << j), bool(i & 2 << j), bool(i & 4 << j) and j == 0) for j in range(2))
        got = run_engine(ENGINE, case, Wants(*wanted, shared=shared))
        flags = dict(zip(names, wanted)) | {f"shared{j}.{part}": flag for j in range(2) for part, flag in
                                            zip(("w_gate_up", "w_down", "gate_weight"), shared[j])}
        for name, flag in flags.items():
            assert same_bits(got[name], everything[name] if flag else None), f"{name}, {wanted}, {shared}"


def test_unwanted_gradients_cost_no_buffers(monkeypatch):
    """No row buffer, no product for what is frozen: counted, not timed."""
    case = make_case(64, 32, 16, 2, 1, torch.float32)
    products = []

    def counting(original):
        def counted(self, scratch, name, *rest):
            products.append(name)
            return original(self, scratch, name, *rest)

        return counted

    for kind in ("_product", "outer"):
        monkeypatch.setattr(cpu_tiles.TileMath, kind, counting(getattr(cpu_tiles.TileMath, kind)))
    for wants, expected in ((Wants(), set()), (Wants(x=True), {"dh", "dx"}), (Wants(topk_weights=True), {"dh"}), (Wants(w_down=True), {"outer"}),
                            (Wants(b_down=True), set()), (Wants(w_gate_up=True), {"dh", "outer"}), (Wants(b_gate_up=True), {"dh"})):
        case_b = replace(case, tensors=replace(case.tensors, b_gate_up=torch.zeros(2, 32), b_down=torch.zeros(2, 32)))
        plan = ENGINE.build_plan(case_b.topk_ids, 2)
        _, saved = ENGINE.forward(plan, case_b.tensors, case_b.options)
        products.clear()
        ENGINE.backward(plan, case_b.tensors, case_b.options, saved, case_b.dy, wants, None)
        assert set(products) - {"probe.out"} == expected, wants


@pytest.mark.parametrize("dtype", DTYPES)
def test_main_grad_is_added_to(dtype):
    """Accumulators take the sum of two passes; what an expert without rows holds there, even NaN, is left alone to the bit."""
    cases = [make_case(80, 40, 24, 4, 2, dtype, seed=seed) for seed in (0, 1)]                 # expert 3 has no rows
    generator = torch.Generator().manual_seed(2)
    start = MainGrad(torch.randn(4, 48, 40, generator=generator), torch.randn(4, 40, 24, generator=generator))
    for accumulator in (start.w_gate_up, start.w_down):
        accumulator[3, 0] = float("nan")
        accumulator[3, 1] = -0.0
    wide = torch.zeros(4, 48, 80)                                                                # strided: every other column
    wide[:, :, ::2] = start.w_gate_up
    main = MainGrad(wide[:, :, ::2], start.w_down.clone())
    total = {"w_gate_up": start.w_gate_up.double(), "w_down": start.w_down.double()}
    for case in cases:
        got = run_engine(ENGINE, case, main_grad=main)
        assert got["w_gate_up"] is None and got["w_down"] is None and got["x"] is not None
        truth = plain(case)
        total = {name: total[name] + truth[name] for name in total}
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    for name, tensor in (("w_gate_up", main.w_gate_up), ("w_down", main.w_down)):
        error = (tensor[:3].double() - total[name][:3]).abs().max()
        assert error < 8 * eps * total[name][:3].abs().max(), name
        assert same_bits(tensor[3], getattr(start, name)[3]), name
    assert wide[:, :, 1::2].eq(0).all()


def test_main_grad_in_bf16_keeps_what_bf16_would_round_away():
    """A pass's weight gradient enters the accumulator from its fp32 sum, not from a bf16 copy of it."""
    case = make_case(200, 48, 24, 2, 1, torch.bfloat16)
    main = MainGrad(torch.zeros(2, 48, 48), torch.zeros(2, 48, 24))
    run_engine(ENGINE, case, main_grad=main)
    rounded = run_engine(ENGINE, case)
    for name in ("w_gate_up", "w_down"):
        fine = getattr(main, name)
        assert same_bits(fine.bfloat16(), rounded[name])
        assert (fine != fine.bfloat16().float()).float().mean() > 0.3


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_nan_stays_in_its_expert(dtype):
    """NaN weights of one expert, and a token of NaN: every row of other experts and tokens, and every other expert's gradients, keep their bits."""
    case = make_case(150, 40, 24, 5, 2, dtype, biases=True, topk_ids=torch.rand(150, 5, generator=torch.Generator().manual_seed(1)).argsort(1)[:, :2])
    clean = run_engine(ENGINE, case)
    spoilt = [None if t is None else t.clone() for t in (case.tensors.w_gate_up, case.tensors.w_down, case.tensors.b_gate_up, case.tensors.b_down)]
    for tensor in spoilt:
        tensor[2] = float("nan")
    got = run_engine(ENGINE, replace(case, tensors=replace(case.tensors, w_gate_up=spoilt[0], w_down=spoilt[1], b_gate_up=spoilt[2], b_down=spoilt[3])))
    hit = (case.topk_ids == 2).any(1)
    assert 0 < int(hit.sum()) < 150
    for name in ("y", "x"):
        assert got[name][hit].isnan().all() and same_bits(got[name][~hit], clean[name][~hit]), name
    assert same_bits(got["topk_weights"][case.topk_ids != 2], clean["topk_weights"][case.topk_ids != 2])
    others = [0, 1, 3, 4]
    for name in ("w_gate_up", "w_down", "b_gate_up", "b_down"):
        assert same_bits(got[name][others], clean[name][others]), name

    x = case.tensors.x.clone()
    x[7] = float("nan")
    got = run_engine(ENGINE, replace(case, tensors=replace(case.tensors, x=x)))
    rest = torch.arange(150) != 7
    for name in ("y", "x", "topk_weights"):
        assert same_bits(got[name][rest], clean[name][rest]), name
    untouched = [e for e in range(5) if e not in case.topk_ids[7].tolist()]
    assert same_bits(got["w_gate_up"][untouched], clean["w_gate_up"][untouched])


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_any_strides_give_the_bits_of_contiguous_inputs(dtype):
    """Expanded, transposed, sliced and misaligned inputs and dy."""
    case = make_case(70, 33, 17, 3, 2, dtype, biases=True, shared=((9, True),))

    def every_other(t):
        big = torch.full((*t.shape[:-1], 2 * t.shape[-1]), float("nan"), dtype=t.dtype)
        big[..., ::2] = t
        return big[..., ::2]

    def transposed(t):
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)

    def misaligned(t):
        return torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape).copy_(t)

    contiguous = run_engine(ENGINE, case)
    for change in (every_other, transposed, misaligned):
        t = case.tensors
        moved = {f.name: change(getattr(t, f.name)) for f in fields(t) if f.name != "shared" and (change is not transposed or getattr(t, f.name).dim() > 1)}
        shared = tuple(replace(s, w_gate_up=change(s.w_gate_up), w_down=change(s.w_down), gate_weight=every_other(s.gate_weight)) for s in t.shared)
        got = run_engine(ENGINE, replace(case, tensors=replace(t, **moved, shared=shared), dy=change(case.dy)))
        assert not differing(got, contiguous), change.__name__

    ones = torch.ones((), dtype=dtype).expand(70, 33)                                        # what y.sum().backward() gives
    row = case.tensors.x[:1].expand(70, 33)
    got = run_engine(ENGINE, replace(case, tensors=replace(case.tensors, x=row), dy=ones))
    expected = run_engine(ENGINE, replace(case, tensors=replace(case.tensors, x=row.contiguous()), dy=ones.contiguous()))
    assert not differing(got, expected)


def test_saves_exactly_what_the_protocol_says():
    case = make_case(50, 40, 24, 3, 2, torch.bfloat16, shared=((8, True), (12, False)))
    plan = ENGINE.build_plan(case.topk_ids, 3)
    _, saved = ENGINE.forward(plan, case.tensors, case.options)
    assert saved.z.shape == (plan.num_rows, 48) and saved.shared_z.shape == (50, 2 * 8 + 2 * 12) and saved.z.dtype == torch.bfloat16
    y, unsaved = ENGINE.forward(plan, case.tensors, replace(case.options, save_for_backward=False))
    assert unsaved.z.shape[0] == 0 and unsaved.shared_z.shape[0] == 0
    assert same_bits(y, ENGINE.forward(plan, case.tensors, case.options)[0])
    rows = torch.nonzero(plan.row_to_slot >= 0).flatten()
    tokens = plan.row_to_slot[rows].long() // 2
    expert = plan.tile_to_expert[rows // 128].long()
    truth = torch.einsum("rh,rih->ri", case.tensors.x[tokens].double(), case.tensors.w_gate_up[expert].double())
    assert (saved.z[rows].double() - truth).abs().max() < 2**-7 * truth.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_recomputed_z_changes_no_bit(dtype):
    """Backward without any saved z: odd sizes, biases, shared experts; all gradients, then some that need z of one kind only."""
    case = make_case(700, 65, 33, 5, 3, dtype, biases=True, shared=SHARED)
    plan = ENGINE.build_plan(case.topk_ids, 5)
    again = replace(case.options, save_for_backward=False, recompute="z")
    y, saved = ENGINE.forward(plan, case.tensors, case.options)
    y_again, nothing = ENGINE.forward(plan, case.tensors, again)
    assert same_bits(y, y_again) and nothing.z.shape[0] == nothing.shared_z.shape[0] == 0
    none = ((False, False, False),) * 3
    for wants in (want_all(case), Wants(w_down=True, shared=none), Wants(b_down=True, shared=((False, True, False), *none[1:])), Wants(shared=none)):
        expected = named(ENGINE.backward(plan, case.tensors, case.options, saved, case.dy, wants, None))
        assert not differing(named(ENGINE.backward(plan, case.tensors, again, nothing, case.dy, wants, None)), expected), wants


def test_quantised_precision_is_refused():
    case = make_case(4, 16, 16, 2, 1, torch.bfloat16)
    plan = ENGINE.build_plan(case.topk_ids, 2)
    with pytest.raises(NotImplementedError, match="precision='mxfp8'"):
        ENGINE.forward(plan, case.tensors, PassOptions(precision="mxfp8"))


def test_inference_mode_and_gradients_required_of_inputs():
    """Inputs that require gradients, inside and outside of inference mode: the same bits, nothing recorded."""
    case = make_case(40, 24, 16, 3, 2, torch.float32)
    expected = run_engine(ENGINE, case)
    with torch.inference_mode():
        assert not differing(run_engine(ENGINE, case), expected)
    wanting = replace(case, tensors=replace(case.tensors, x=case.tensors.x.clone().requires_grad_(), w_down=case.tensors.w_down.clone().requires_grad_()))
    got = run_engine(ENGINE, wanting)
    assert not differing(got, expected) and not got["y"].requires_grad


def test_falls_back_to_one_row_a_tile_where_rows_lose_their_bits(monkeypatch, capsys):
    """On a CPU whose tiles fail the measurement every row is a tile of its own: as accurate, batch-free, and it says so once."""
    monkeypatch.setattr(runtime, "scratch", {})
    monkeypatch.setattr(runtime, "_said", set())
    monkeypatch.setattr(cpu_tiles, "measure_row_stability", lambda math, scratch, probe: (False, ()))
    case = make_case(30, 21, 11, 3, 2, torch.float32, biases=True, shared=((5, True),))
    got = run_engine(ENGINE, case)
    check_case(case, got)
    part = run_engine(ENGINE, case.keep(torch.tensor([17, 3])))
    assert all(same_bits(part[name], got[name][[17, 3]]) for name in ("y", "x", "topk_weights"))
    assert capsys.readouterr().err.count("row by row") == 1


def test_want_all_names_every_gradient():
    """The helper that most tests here rely on must not leave a gradient out."""
    case = make_case(5, 8, 8, 2, 1, torch.float32, biases=True, shared=((4, True), (4, False)))
    got = run_engine(ENGINE, case, want_all(case))
    assert [name for name, tensor in got.items() if tensor is None] == ["shared1.gate_weight"]

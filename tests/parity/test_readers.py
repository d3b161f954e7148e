"""What a user reads from an offloaded model: full tensors, or a refusal that says what to do."""

import copy
import io
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from case import BF16, FP32, Case, Trained, engine_step, oracle_step, same_bits

from offload.errors import StateError

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def attempts(tmp_path_factory):
    """The lines of read_evicted.py, which tries each operation on an evicted parameter."""
    path = os.pathsep.join([str(HERE), str(HERE.parent), str(HERE.parents[1])])
    child = subprocess.run(
        [sys.executable, str(HERE / "read_evicted.py"), str(tmp_path_factory.mktemp("evicted"))],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    return child.returncode, child.stdout.splitlines(), child.stderr


def test_no_read_of_an_evicted_parameter_crashes_the_process(attempts):
    status, lines, errors = attempts
    assert status == 0, f"{lines[-1:]}, then: {errors[-500:]}"
    assert lines[-1] == "trained on"


def test_every_read_of_an_evicted_parameter_is_served_or_refused(attempts):
    _, lines, _ = attempts
    outcomes = [line for line in lines if line.split()[0] in ("served", "refused", "wrong")]
    assert len(outcomes) >= 95
    assert not [line for line in outcomes if line.startswith("wrong")]


def test_reads_in_c_that_ask_nobody_find_nan_and_do_not_crash(attempts):
    _, lines, _ = attempts
    found = [line for line in lines if line.startswith("bypassed")]
    assert len(found) == 6
    assert not [line for line in found if not line.endswith(": 0")]


def test_refusals_name_the_parameter_and_the_way_out(attempts):
    _, lines, _ = attempts
    refusals = [line for line in lines if line.startswith("refused")]
    assert refusals, "reading freed memory must be refused somewhere"
    for line in refusals:
        assert re.search(r"(embed|blocks\.\d\.\w+)\.weight", line), line
        assert "gathered" in line or "state_dict" in line, line


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_state_dict_holds_full_tensors_of_what_moves(dtype, tied, tmp_path):
    case = Case(dtype=dtype, options=(("tied", tied),), num_steps=2)
    oracle = case.oracle()
    with case.engine(tmp_path) as engine:
        for step in range(case.num_steps):
            engine_step(engine, case, step, Trained())
            oracle_step(oracle, case, step, Trained())
        seen, expected = engine.module.state_dict(), oracle.model.state_dict()
        assert list(seen) == list(expected)
        for name in expected:
            assert seen[name].dtype is dtype
            assert same_bits(seen[name], expected[name].to(dtype)), name


def test_a_saved_state_dict_loads_into_a_plain_model(tmp_path):
    case = Case(options=(("tied", True),))
    with case.engine(tmp_path) as engine:
        engine_step(engine, case, 0, Trained())
        file = io.BytesIO()
        torch.save(engine.module.state_dict(), file)
        masters = {n: engine.full_fp32_param(p) for n, p in engine.module.named_parameters()}
    file.seek(0)
    plain = case.model()
    plain.load_state_dict(torch.load(file, weights_only=True))
    assert plain.head.weight is plain.embed.weight
    for name, param in plain.named_parameters():
        assert torch.allclose(param, masters[name], rtol=2**-8, atol=0), name


@pytest.mark.parametrize("copying", [copy.deepcopy, pickle.dumps], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("when", ["wrapped", "trained"])
def test_copying_a_wrapped_model_is_refused_with_the_way_out(copying, when, tmp_path):
    case = Case()
    with case.engine(tmp_path) as engine:
        if when == "trained":
            engine_step(engine, case, 0, Trained())
        with pytest.raises(StateError, match=r"state_dict|gathered"):
            copying(engine.module)
        engine_step(engine, case, 1, Trained())


def test_masters_and_moments_are_copies_whatever_was_evicted(tmp_path):
    case = Case()
    with case.engine(tmp_path) as engine:
        for name, param in engine.module.named_parameters():
            start = dict(case.model().named_parameters())[name]
            assert same_bits(engine.full_fp32_param(param), start.detach()), name
            assert not engine.full_optimizer_state(param, "exp_avg").any()
        engine_step(engine, case, 0, Trained())
        param = engine.module.blocks[0].up.weight
        first = engine.full_fp32_param(param)
        kept = first.clone()
        first.zero_()
        assert torch.equal(engine.full_fp32_param(param), kept)
        engine_step(engine, case, 1, Trained())
        assert not torch.equal(engine.full_fp32_param(param), kept)

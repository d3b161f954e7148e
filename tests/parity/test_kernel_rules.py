"""SGD, momentum, Lion and Adagrad through the engine: the bits of the same kernels in memory.

That the kernels do what torch and the papers say is shown in tests/optim and tests/simd; here one
comparison with torch itself, end to end, sees to it that settings arrive.
"""

import pytest
import torch
import torch_training as twin
from torch import optim

from offload import kernels
from offload.optim.choice import choose, progress_of

CASES = {
    "sgd": ({"lr": 0.3}, {"weight_decay": 0.1}),
    "momentum": ({"lr": 0.1, "momentum": 0.9}, {"momentum": 0.5, "nesterov": True}),
    "one group with momentum": ({"lr": 0.1}, {"momentum": 0.5, "dampening": 0.3}),
    "lion": ({"lr": 1e-2}, {"betas": (0.8, 0.9), "weight_decay": 0.1}),
    "adagrad": ({"lr": 1e-2, "initial_accumulator_value": 0.1}, {"lr_decay": 0.1}),
}
NAMES = {"momentum": "sgd", "one group with momentum": "sgd"}
TORCH = {"sgd": optim.SGD, "adagrad": optim.Adagrad}


def in_memory(name: str) -> type[optim.Optimizer]:
    """A torch optimizer over whole fp32 masters whose arithmetic is our kernels'."""

    class Whole(optim.Optimizer):
        def __init__(self, groups, **settings):
            self.rule = choose(name, groups, {}).rule
            self.progress = progress_of(self.rule)
            super().__init__(groups, dict(self.rule.defaults))

        @torch.no_grad()
        def step(self):
            params = [p for group in self.param_groups for p in group["params"]]
            live = {i: p for i, p in enumerate(params) if p.grad is not None}
            groups = [
                (group, [i for i, p in live.items() if any(p is q for q in group["params"])])
                for group in self.param_groups
            ]
            rows, row_of = self.progress.next_rows(groups, grad_scale=1.0)
            for i, param in live.items():
                state = self.state[param]
                kept = [
                    kernels.State(key, state.setdefault(key, torch.zeros_like(param)))
                    for key in self.rule.states
                ]
                kernels.update(kernels.Whole(param), kept, param.grad, row=rows[row_of[i]])
            self.progress.advance(live)

    return Whole


@pytest.mark.parametrize("overlap", ["hold", "speculate"])
@pytest.mark.parametrize("case", CASES)
def test_training_gives_the_bits_of_the_kernels_in_memory(case, overlap, tmp_path):
    name, (base, spare) = NAMES.get(case, case), CASES[case]
    memory = twin.InMemory(twin.build(), in_memory(name), base, spare).train(0, twin.NUM_STEPS)
    with twin.engine(tmp_path, name, base, spare, overlap=overlap) as engine:
        twin.assert_same_training(engine, memory)
        twin.assert_moved(twin.masters(engine))
        for key, param in engine.module.named_parameters():
            for state, theirs in memory.optimizer.state[memory.masters[key]].items():
                assert torch.equal(engine.full_optimizer_state(param, state), theirs), (key, state)


@pytest.mark.parametrize("chunk_elems", [2048, 1 << 20])
@pytest.mark.parametrize("threshold", [0, 1000])
def test_chunks_and_small_tensors_do_not_change_the_bits(chunk_elems, threshold, tmp_path):
    base, spare = CASES["lion"]
    memory = twin.InMemory(twin.build(), in_memory("lion"), base, spare).train(0, twin.NUM_STEPS)
    settings = {"chunk_elems": chunk_elems, "param_persistence_threshold": threshold}
    with twin.engine(tmp_path, "lion", base, spare, **settings) as engine:
        twin.assert_same_training(engine, memory)


@pytest.mark.parametrize("case", [case for case in CASES if NAMES.get(case, case) in TORCH])
def test_torch_makes_the_same_of_the_gradients_that_were_kept(case, tmp_path):
    name, (base, spare) = NAMES.get(case, case), CASES[case]
    memory = twin.InMemory(twin.build(), TORCH[name], base, spare)
    with twin.engine(tmp_path, TORCH[name], base, spare) as engine:
        for step in range(twin.NUM_STEPS):
            engine.backward(engine(*twin.batch(step)))
            kept = {key: engine.kept_grad(key) for key in memory.masters}
            engine.step()
            factor = min(1.0, twin.CLIPPING / (engine.grad_norm + 1e-6))
            assert factor < 1.0
            for key, master in memory.masters.items():
                if kept[key] is not None:
                    master.grad = kept[key].float().view(master.shape) * factor
            memory.optimizer.step()
            memory.optimizer.zero_grad()
        for key, ours in twin.masters(engine).items():
            theirs = memory.masters[key].detach()
            bound = twin.NUM_STEPS * 4 * 2.0**-23 * theirs.abs().clamp(min=base["lr"])
            assert torch.all((ours - theirs).abs() <= bound), key


@pytest.mark.parametrize(
    ("case", "roles"), [("sgd", ()), ("momentum", ("exp_avg",)), ("lion", ("exp_avg",))]
)
def test_roles_that_an_optimizer_lacks_are_neither_reserved_nor_moved(case, roles, tmp_path):
    name, (base, spare) = NAMES.get(case, case), CASES[case]
    with twin.engine(tmp_path, name, base, spare) as engine:
        twin.train(engine, 0, 3)
        for counted in (engine.metrics.read_bytes, engine.metrics.write_bytes):
            moved = {key for key, num_bytes in counted.items() if num_bytes}
            assert {f"update.{role}" for role in roles} == {
                key for key in moved if key.startswith("update.exp_avg")
            }
        elems = sum(param.numel() for param in engine.module.parameters())
        reserved = sum(file.stat().st_blocks * 512 for file in tmp_path.rglob("*.[AB]"))
        assert 2 * (4 + 4 * len(roles)) * elems < reserved
        assert reserved < 2 * (4 + 4 * len(roles)) * elems + 2 * 4 * elems


@pytest.mark.parametrize("case", ["lion", "adagrad", "momentum"])
@pytest.mark.parametrize("state_dtype", ["bf16", "int8"])
def test_other_formats_of_state_train_too(case, state_dtype, tmp_path):
    """Close to fp32 state; that the bits are those of the kernels is the formats' own test."""
    name, (base, spare) = NAMES.get(case, case), CASES[case]
    settings = {"state_dtype": state_dtype, "chunk_elems": None, "host_memory": "64MiB"}
    with twin.engine(tmp_path / "plain", name, base, spare) as engine:
        norms = twin.train(engine, 0, twin.NUM_STEPS)
    with twin.engine(tmp_path / "small", name, base, spare, **settings) as engine:
        found = twin.train(engine, 0, twin.NUM_STEPS)
        twin.assert_moved(twin.masters(engine))
    assert found == pytest.approx(norms, rel=0.2)
    assert found != norms


@pytest.mark.parametrize("case", CASES)
def test_fp16_weights_beside_whole_masters_give_the_bits_of_memory(case, tmp_path):
    name, (base, spare) = NAMES.get(case, case), CASES[case]
    memory = twin.InMemory(twin.build(), in_memory(name), base, spare, scale=512.0)
    memory.train(0, twin.NUM_STEPS)
    settings = {"dtype": "fp16", "initial_scale_power": 9, "overlap": "speculate"}
    with twin.engine(tmp_path, name, base, spare, **settings) as engine:
        twin.assert_same_training(engine, memory)
        twin.assert_moved(twin.masters(engine))

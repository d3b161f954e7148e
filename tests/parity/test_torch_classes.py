"""Torch optimizers without a kernel: the same bits as the same class on fp32 masters in memory."""

import pytest
import torch
import torch_training as twin
from torch import optim

from offload import OffloadEngine

ELEMENTWISE = {
    "RAdam": (optim.RAdam, {"lr": 1e-2, "weight_decay": 0.1}, {"betas": (0.8, 0.9)}),
    "NAdam": (optim.NAdam, {"lr": 1e-2}, {"momentum_decay": 0.01}),
    "Adamax": (optim.Adamax, {"lr": 1e-2}, {"lr": 1e-3}),
    "Adadelta": (optim.Adadelta, {"lr": 1.0}, {"rho": 0.5}),
    "RMSprop": (optim.RMSprop, {"lr": 1e-3, "momentum": 0.9}, {"alpha": 0.9}),
    "Rprop": (optim.Rprop, {"lr": 1e-3}, {"etas": (0.4, 1.3)}),
    "ASGD": (optim.ASGD, {"lr": 1e-2}, {"lambd": 1e-2}),
}


@pytest.mark.parametrize("overlap", ["hold", "speculate"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_elementwise_class_gives_the_bits_of_memory(name, overlap, tmp_path):
    cls, base, spare = ELEMENTWISE[name]
    memory = twin.InMemory(twin.build(), cls, base, spare).train(0, twin.NUM_STEPS)
    with twin.engine(tmp_path, cls, base, spare, overlap=overlap) as engine:
        twin.assert_same_training(engine, memory)
        twin.assert_moved(twin.masters(engine))
        param = engine.module.spare.weight
        for state, theirs in memory.optimizer.state[memory.masters["spare.weight"]].items():
            if torch.is_tensor(theirs) and theirs.ndim:
                assert torch.equal(engine.full_optimizer_state(param, state), theirs)


@pytest.mark.parametrize("chunk_elems", [2048, 1 << 20])
@pytest.mark.parametrize("threshold", [0, 1000])
def test_chunks_and_small_tensors_do_not_change_the_bits(chunk_elems, threshold, tmp_path):
    cls, base, spare = ELEMENTWISE["NAdam"]
    memory = twin.InMemory(twin.build(), cls, base, spare).train(0, twin.NUM_STEPS)
    settings = {"chunk_elems": chunk_elems, "param_persistence_threshold": threshold}
    with twin.engine(tmp_path, cls, base, spare, **settings) as engine:
        twin.assert_same_training(engine, memory)
        twin.assert_moved(twin.masters(engine))


@pytest.mark.filterwarnings("ignore:Detected call")  # the instance itself never steps
def test_an_instance_is_taken_with_its_groups_and_its_scheduler(tmp_path):
    model = twin.build()
    groups = twin.groups_of(model, {"lr": 0.1}, {"lr": 0.01})
    instance = optim.SGD(groups, momentum=0.9)
    scheduler = optim.lr_scheduler.StepLR(instance, 1, gamma=0.5)
    with OffloadEngine(
        model, nvme_path=tmp_path, optimizer=instance, device="cpu", compute_dtype=torch.float32
    ) as engine:
        for step in range(3):
            engine.backward(engine(*twin.batch(step)))
            engine.step()
            scheduler.step()
        assert [group["lr"] for group in engine.optimizer.param_groups] == [0.0125, 0.00125]
        assert engine.full_optimizer_state("spare.weight", "momentum_buffer").any()


@pytest.mark.parametrize("threshold", [0, 1000])
def test_fp16_weights_beside_whole_masters_give_the_bits_of_memory(threshold, tmp_path):
    cls, base, spare = ELEMENTWISE["RAdam"]
    memory = twin.InMemory(twin.build(), cls, base, spare, scale=512.0).train(0, twin.NUM_STEPS)
    settings = {"dtype": "fp16", "loss_scale": 512, "param_persistence_threshold": threshold}
    with twin.engine(tmp_path, cls, base, spare, **settings) as engine:
        twin.assert_same_training(engine, memory)
        twin.assert_moved(twin.masters(engine))
        seen = engine.module.state_dict()
        for name, master in memory.masters.items():
            assert torch.equal(seen[name], master.detach().half()), name

"""What the simulated Ascend shows, and that it can say no: what fails on hardware must fail on it.

Each program in tests/sim_ascend/programs runs once and writes what it saw; the tests hold it against expectations. Those
that take `npu_environment` also run on real cards, the others are about the simulator and skip there.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sft.device import torch_version
from tests.conftest import launch, must, once, run_script
from tests.sim_ascend import build, environment
from tests.sim_ascend.build import stack

pytest_plugins = ["tests.sim_ascend.fixtures"]
pytestmark = pytest.mark.npu

PROGRAMS = Path(__file__).parent / "sim_ascend" / "programs"
TORCH_21 = torch_version() == (2, 1)
FSDP2 = torch_version() >= (2, 6)
FLOAT32_SUMS = 1e-6  # gradients of order 0.1, added up in another order


def shared_memory() -> set[str]:
    """Names in /dev/shm, but those that data loaders of other tests make and take away meanwhile."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("torch_", "sem.", "psm_", "pymp-"))}


def run_ranks(directory, parts, variables, succeed=True) -> dict:
    """Runs ranks.py on two cards and reads what each rank saw; None for a rank that left nothing."""
    shutil.rmtree(directory, ignore_errors=True)  # of a worker that failed
    directory.mkdir()
    before = shared_memory()
    ranks = []
    for rank in range(2):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        with open(directory / f"rank{rank}.log", "w") as log:
            command = [sys.executable, PROGRAMS / "ranks.py", directory, *parts]
            env = {**os.environ, **variables, **place}
            ranks.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
    codes = [rank.wait(timeout=150) for rank in ranks]
    logs = "\n".join((directory / f"rank{rank}.log").read_text()[-3000:] for rank in range(2))
    assert not succeed or codes == [0, 0], logs
    files = [directory / f"rank{rank}.json" for rank in range(2)]
    seen = {
        "codes": codes,
        "left in shared memory": sorted(shared_memory() - before),
        "printed": logs,
        "ranks": [json.loads(file.read_text()) if file.exists() else None for file in files],
    }
    (directory / "seen.json").write_text(json.dumps(seen))
    return seen


def ranks_once(directory, parts, variables, succeed=True) -> dict:
    once(directory, lambda path: run_ranks(path, parts, variables, succeed))
    return json.loads((directory / "seen.json").read_text())


@pytest.fixture(scope="session")
def card(session_dir, simulated_environment) -> dict:
    """What one process saw with two cards of 1 GiB visible."""

    def make(path):
        visible = {"ASCEND_RT_VISIBLE_DEVICES": "2,5"}
        run = must(run_script(PROGRAMS / "one_card.py", path, env={**environment(memory_bytes=1 << 30), **visible}))
        path.write_text(json.dumps(json.loads(path.read_text()) | {"printed": run.stderr}))

    return json.loads(once(session_dir / "sim-card", make).read_text())


@pytest.fixture(scope="session")
def strict_ranks(session_dir, simulated_environment) -> dict:
    """Two ranks without the task queue, where an error is raised by the call that makes it."""
    parts = ["sums_between_operators", "collectives", "mismatch", "absent"]
    variables = {"TASK_QUEUE_ENABLE": "0", "HCCL_EXEC_TIMEOUT": "8"}
    return ranks_once(session_dir / "sim-ranks-0", parts, {**simulated_environment, **variables})


@pytest.fixture(scope="session")
def default_ranks(session_dir, simulated_environment) -> dict:
    """Two ranks with torch_npu's default settings, one of which is killed in the end."""
    variables = {"TASK_QUEUE_ENABLE": "1", "HCCL_EXEC_TIMEOUT": "8"}
    parts = ["sums_between_operators", "ddp", "killed"]
    return ranks_once(session_dir / "sim-ranks-1", parts, {**simulated_environment, **variables}, succeed=False)


@pytest.fixture(scope="session")
def npu_ranks(session_dir, npu_environment) -> dict:
    """Two ranks with the settings that train.py uses, simulated or real."""
    variables = {"TASK_QUEUE_ENABLE": "2", "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
    parts = ["sums_between_operators", "ddp", "thread"] + ["fsdp2"] * FSDP2
    return ranks_once(session_dir / "npu-ranks-2", parts, {**npu_environment, **variables})


@pytest.fixture(scope="session")
def finetuned(session_dir, npu_environment) -> dict:
    """LoRA on two cards, started by the command line of Accelerate, simulated or real."""

    def make(path):
        config = path.with_suffix(".yaml")
        config.write_text("distributed_type: MULTI_NPU\nnum_processes: 2\n")
        must(launch(str(config), PROGRAMS / "finetune.py", path, env=npu_environment))

    return json.loads(once(session_dir / "npu-finetuned", make).read_text())


@pytest.fixture(scope="session")
def on_hardware(npu_environment) -> bool:
    return not npu_environment


# ---- cards --------------------------------------------------------------------------------------------------------


def test_cards_are_those_asked_for(card):
    assert card["cards"]["available"] is True
    assert card["cards"]["count"] == 2
    assert card["cards"]["name"] == "Ascend910B3"
    assert card["cards"]["accelerator"] == "npu"
    assert card["cards"]["bfloat16"] is True


def test_a_card_that_is_not_visible_is_refused(card):
    assert "error code is 107001" in card["cards"]["third card"]
    assert "device id 2 is not among the 2 visible devices" in card["cards"]["third card"]


COUNT = "import ctypes; n = ctypes.c_uint(); ctypes.CDLL('libascendcl.so').aclrtGetDeviceCount(ctypes.byref(n)); print(n.value)"


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 8), ("0", 1), ("7,1,3", 3), ("", 0), ("0,1,8,2", 2), ("4,4", 1), ("-1", 0), ("x", 0)]
)
def test_visible_devices_are_read_up_to_the_first_wrong_entry(simulated_environment, visible, count):
    variables = {} if visible is None else {"ASCEND_RT_VISIBLE_DEVICES": visible}
    assert must(run_script("-c", COUNT, env={**simulated_environment, **variables})).stdout.strip() == str(count)


def test_no_visible_card_means_no_npu(simulated_environment):
    program = "import torch, torch_npu; print(torch.npu.is_available(), torch.npu.device_count())"
    result = must(run_script("-c", program, env={**simulated_environment, "ASCEND_RT_VISIBLE_DEVICES": ""}))
    assert result.stdout.split() == ["False", "0"]


def test_cann_says_that_it_is_simulated(simulated_environment):
    home = Path(simulated_environment["ASCEND_HOME_PATH"])
    assert (home / "SIMULATED").exists()
    infos = list(home.glob("*-linux/ascend_toolkit_install.info"))
    assert len(infos) == 1
    assert f"\nversion={stack().cann}\n" in infos[0].read_text()
    assert "simulated" in infos[0].read_text()


def test_a_build_is_made_once(simulated_environment):
    root = build()
    made = (root / "lib" / "libsimcann.so").stat().st_mtime_ns
    assert build() == root
    assert (root / "lib" / "libsimcann.so").stat().st_mtime_ns == made


# ---- memory -------------------------------------------------------------------------------------------------------


def test_memory_is_counted_by_torch_npu_and_by_the_card(card):
    memory = card["memory"]
    assert memory["total"] == 1024
    assert memory["allocated at first"] == 0
    assert memory["allocated"] == 64
    assert memory["reserved - used"] == 0
    assert memory["allocated with a result"] == 128
    assert memory["used after all"] == 0


def test_memory_that_is_not_there_is_an_out_of_memory_error(card):
    memory = card["memory"]
    assert "NPU out of memory. Tried to allocate" in memory["too much"]
    assert "1024.00 MiB total capacity; 128.00 MiB already allocated" in memory["too much"]
    assert memory["usable afterwards"] == 2.0 * (64 << 20) / 4
    assert memory["blocks of 100"] == 10
    assert memory["peak"] == 1000


# ---- operators ----------------------------------------------------------------------------------------------------


def test_operators_that_are_not_simulated_are_named(card):
    assert "aclnnGeluV2 or aclnnGeluV2GetWorkspaceSize not in libopapi.so" in card["unsupported"]["aclnn"]
    # torch_npu 2.1 prints what it does not raise.
    assert "operator SortV2 is not simulated" in card["unsupported"]["by name"] + card["printed"] * TORCH_21


@pytest.mark.parametrize("what", ["causal", "band", "rms_norm", "rotary", "swiglu", "swiglu of dim 0"])
def test_fused_operators_and_their_gradients_are_their_formulas(card, what):
    assert card["fused"][what] < 2e-6  # sums of a dozen numbers of order 1 in float32


def test_attention_without_a_mask_is_full_without_a_word(card):
    """As on hardware, where sparse_mode is then ignored: whoever forgets the mask must see it in a test."""
    assert card["fused"]["no mask"] < 2e-6


def test_fused_attention_refuses_what_its_contract_does_not_allow(card):
    assert "atten_mask must be 2048 x 2048 bool" in card["fused"]["mask of another size"]
    assert "actual_seq_qlen must end at the number of tokens" in card["fused"]["ends that miss a token"]


def test_tensors_on_different_devices_are_refused(card):
    assert "Expected all tensors to be on the same device" in card["operators"]["NPU + CPU"]
    assert "Expected all tensors to be on the same device" in card["operators"]["NPU + other NPU"]
    assert card["operators"]["indexed by the CPU"] == [3.0, 1.0]  # torch allows this one


def test_three_adamw_steps_are_those_of_the_cpu(card):
    assert card["operators"]["adamw"] == 0.0


def test_attention_and_its_gradient_are_those_of_the_cpu(card):
    assert card["operators"]["attention"] < 1e-4  # gradients of order 100; the CPU takes its fused kernel


def test_results_reach_their_place(card):
    operators = card["operators"]
    assert operators["resized out"] == [2.0, 2.0, 2.0]
    assert operators["pinned"] is True
    assert operators["pinned copy"] == [1.0, 1.0, 1.0]
    assert operators["autocast"] == "torch.bfloat16"


def test_random_numbers_follow_from_the_seed_of_the_card(card):
    numbers = card["random_numbers"]
    assert numbers["seed repeats"]
    assert numbers["numbers advance"]
    assert numbers["state repeats dropout"]
    assert 700 < numbers["kept by dropout"] < 800  # of 1000 at p = 0.25; 3.6 standard deviations
    assert "Expected a 'npu' device type for generator" in numbers["generator of the CPU"]


# ---- HCCL ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", ["strict_ranks", "default_ranks", "npu_ranks"])
def test_sums_are_right_whatever_the_task_queue(ranks, request):
    """With TASK_QUEUE_ENABLE 0, 1 and 2. A queue that is not drained in time gives wrong sums without any error."""
    assert request.getfixturevalue(ranks)["ranks"][0]["sums_between_operators"] == {"wrong": 0}


def test_collectives_give_the_values_of_torch(strict_ranks):
    for rank, seen in enumerate(seen["collectives"] for seen in strict_ranks["ranks"]):
        for dtype in ("float32", "bfloat16", "float16", "int64", "int32", "uint8"):
            assert seen[f"sum torch.{dtype}"] == 2
        assert seen["sum torch.bool"] is True
        assert [seen[op] for op in ("MAX", "MIN", "PRODUCT")] == [3.0, 2.0, 6.0]
        if TORCH_21:
            assert "Cannot use ReduceOp.AVG with HCCL" in seen["AVG error"]
        else:
            assert seen["AVG"] == 2.5
        assert "Unsupported data type" in seen["float64"]
        assert seen["broadcast"] == 11.0
        assert seen["all_gather"] == [[10.0] * 3, [11.0] * 4]
        assert seen["reduce_scatter"] == [[2.0, 2.0], [10.0, 10.0]][rank]
        assert seen["all_to_all"] == [[0.0, 10.0], [1.0, 11.0]][rank]
        assert seen["received all"] is True
        assert seen["objects"] == [{"rank": 0}, {"rank": 1}]


def test_ranks_that_run_different_collectives_are_both_told(strict_ranks):
    for rank in strict_ranks["ranks"]:
        assert "EI0005: inconsistent collective" in rank["mismatch"]["operation"]
        assert "HcclAllReduce count 4" in rank["mismatch"]["operation"]
        assert "HcclBroadcast count 4" in rank["mismatch"]["operation"]


def test_ranks_that_bring_different_counts_are_both_told(strict_ranks):
    for rank in strict_ranks["ranks"]:
        assert "EI0005: inconsistent collective" in rank["mismatch"]["count"]
        assert "HcclAllReduce count 4" in rank["mismatch"]["count"]
        assert "HcclAllReduce count 5" in rank["mismatch"]["count"]


def test_a_rank_that_stays_away_is_named_after_the_time_out(strict_ranks):
    absent = strict_ranks["ranks"][0]["absent"]
    assert "OPS function error: HcclAllreduce, error code is 9" in absent["message"]
    assert "EI0002: time-out in HcclAllReduce: rank 0 of 2 waited for rank 1" in absent["message"]
    assert 7.9 < absent["seconds"] < 30  # HCCL_EXEC_TIMEOUT is 8; the upper bound is for a busy machine


def test_a_communicator_is_memory_without_a_name(strict_ranks):
    """So that there is nothing to leave in /dev/shm, however a job ends."""
    for rank in strict_ranks["ranks"]:
        assert rank["memory of HCCL"] == ["/memfd:simulated-hccl"]
    assert strict_ranks["left in shared memory"] == []


def test_a_killed_rank_is_named_and_leaves_nothing_in_shared_memory(default_ranks):
    assert default_ranks["codes"] == [0, -9]
    assert default_ranks["ranks"][1] is None
    message = default_ranks["ranks"][0]["killed"]["message"]
    if TORCH_21:
        message += default_ranks["printed"]  # torch_npu 2.1 prints what CANN said
    assert "EI0002: time-out in HcclAllReduce: rank 0 of 2 waited for rank 1" in message
    assert default_ranks["left in shared memory"] == []


@pytest.mark.parametrize(
    "kind", ["ddp", pytest.param("fsdp2", marks=pytest.mark.skipif(not FSDP2, reason="FSDP2 needs torch 2.6"))]
)
def test_gradients_of_two_cards_are_those_of_one_cpu_process(npu_ranks, kind, on_hardware):
    for rank in npu_ranks["ranks"]:
        # Matrix products on hardware may round their inputs (HF32).
        assert rank[kind]["difference"] < (1e-3 if on_hardware else FLOAT32_SUMS)


def test_a_thread_that_chose_no_card_disturbs_no_gradient(npu_ranks):
    """It was counted as a use of card 0, for which rank 1 has no streams: autograd ended the process."""
    assert len(npu_ranks["ranks"]) == 2
    for rank in npu_ranks["ranks"]:
        assert rank["thread"] == {"doubled": [6.0] * 4, "gradient": [6.0] * 4}


# ---- Accelerate -----------------------------------------------------------------------------------------------------


def test_accelerate_launch_gives_each_rank_its_card(finetuned):
    assert finetuned["devices"] == ["npu:0", "npu:1"]
    assert finetuned["distributed_type"] == "MULTI_NPU"
    assert finetuned["backend"] == "hccl"


def test_lora_on_two_cards_is_that_of_one_cpu_process(finetuned, on_hardware):
    seen = finetuned["float32"]
    assert len(seen["losses"]) == 3
    assert seen["losses"] == pytest.approx(seen["reference losses"], abs=1e-2 if on_hardware else 1e-5)
    # AdamW at its first steps moves by the sign of the gradient: a rounding error in a gradient near 0 is magnified.
    assert seen["adapter difference"] < (5e-2 if on_hardware else 1e-3)
    assert seen["restored difference"] == 0.0


def test_lora_in_bfloat16_stays_near_the_cpu(finetuned):
    seen = finetuned["bfloat16"]
    assert len(seen["losses"]) == 3
    # bf16 keeps 8 bits of a loss of 6, and the gradients are rounded in another order.
    assert seen["losses"] == pytest.approx(seen["reference losses"], abs=2e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_generated_tokens_are_those_of_the_cpu(finetuned, dtype):
    assert len(finetuned[dtype]["generated"][0]) == 10
    assert finetuned[dtype]["generated"] == finetuned[dtype]["reference generated"]

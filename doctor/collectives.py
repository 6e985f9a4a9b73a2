"""Do the ranks of this launch hear each other? Each step has a deadline, and a rank that is late is named."""

import contextlib
import itertools
import json
import os
import socket
import sys
import threading
import time
from datetime import timedelta

from doctor.explanations import explain, remedy_for
from sft.device import store_has
from sft.errors import UserError

LATE = 3  # exit status when a rank did not come in time
BEAT_S = 0.5  # a rank whose process runs says so this often, even while it waits inside a collective


class Rendezvous:
    """A key-value store beside the process group, in which each rank signs before and after each step.

    A collective that waits for a missing rank hangs inside HCCL or NCCL, which cannot say who is missing; the store can.
    """

    def __init__(self, deadline_s: float):
        from torch.distributed import PrefixStore, TCPStore

        self.rank, self.world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.deadline_s = deadline_s
        host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "0"))
        served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # the launcher's own process holds the store
        settings = {"timeout": timedelta(seconds=deadline_s), "wait_for_workers": False, "multi_tenant": True}
        try:
            store = TCPStore(host, port, is_master=self.rank == 0 and not served, **settings)
            # A store answers one call at a time: the watch needs its own connection while the first one may be waiting.
            self.watch, self.pulse = (
                PrefixStore("doctor", TCPStore(host, store.port, is_master=False, **settings)) for _ in range(2)
            )
        except RuntimeError as error:
            raise UserError(
                f"rank {self.rank} cannot reach the rendezvous at {host}:{port} ({str(error).splitlines()[0]}); check "
                "main_process_ip, main_process_port and the firewall, and that rank 0 has started"
            ) from None
        self.store = PrefixStore("doctor", store)
        self.place = f"{host}:{port}"
        self.watch.set(f"beat/{self.rank}", "0")
        threading.Thread(target=self.beat, daemon=True).start()

    def beat(self) -> None:
        """Tells the others, for as long as this process runs, that it does."""
        for number in itertools.count(1):
            time.sleep(BEAT_S)
            try:
                self.pulse.set(f"beat/{self.rank}", str(number))
            except RuntimeError:  # the store has ended, and with it the launch
                return

    def standing_still(self) -> list[int]:
        """The ranks whose processes do not run: stopped, hanging in the kernel, or on a host that is gone."""

        def beats() -> list[bytes]:
            return [
                self.watch.get(f"beat/{rank}") if store_has(self.watch, f"beat/{rank}") else b""
                for rank in range(self.world_size)
            ]

        before = beats()
        time.sleep(4 * BEAT_S)
        return [rank for rank, (one, two) in enumerate(zip(before, beats())) if one == two != b""]

    def sign(self, step: str, value: str = "here") -> None:
        self.store.set(f"{step}/{self.rank}", value)

    def missing(self, step: str, store=None) -> list[int]:
        """The ranks that have not signed this step."""
        store = store or self.store
        return [rank for rank in range(self.world_size) if not store_has(store, f"{step}/{rank}")]

    def meet(self, step: str, value: str = "here", verb: str = "reached") -> None:
        """Signs and waits for all others; after the deadline names those that did not come and ends the process."""
        timer = self.alarm(step, verb)  # asking may hang as well, where the launcher is stopped
        self.sign(step, value)
        while self.missing(step):
            time.sleep(0.02)
        timer.cancel()

    def alarm(self, step: str, verb: str) -> threading.Timer:
        """A timer that gives up when the deadline is over."""
        timer = threading.Timer(self.deadline_s, self.give_up, (step, verb))
        timer.daemon = True
        timer.start()
        return timer

    def guarded(self, step: str, collective):
        """`collective()` between two signatures; late ranks are named and errors explained, and then the process ends."""
        self.meet(step)
        timer = self.alarm(f"{step} done", "finished")
        try:
            result = collective()
        except RuntimeError as error:  # what HCCL, NCCL and gloo raise
            print(f"FAIL  {step} on rank {self.rank}: {explain(str(error))['message']}", flush=True)
            print(f"      → {remedy_for(str(error))}", flush=True)
            os._exit(LATE)
        timer.cancel()
        self.meet(f"{step} done", verb="finished")
        return result

    def give_up(self, step: str, verb: str) -> None:
        """Says, with one rank's voice, who is late, and ends this process; says that the launcher does not answer if so."""
        name, answers = step.removesuffix(" done"), []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):  # a store that has ended answers so
                answers.append((self.missing(step, self.watch), self.standing_still()))

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(10 * BEAT_S)
        if not answers:
            print(f"FAIL  {name}: rank {self.rank} gets no answer from the rendezvous at {self.place} after "
                  f"{self.deadline_s:.0f} s: the launcher that holds it is stopped, has ended or is cut off\n      → look at the "
                  "launcher on the first server and at the network between the servers", flush=True)  # fmt: skip
            os._exit(LATE)
        late, still = answers[0]
        if not late:  # all have come meanwhile
            return
        # Inside a collective that waits for one rank all are late: those whose processes stand still are the cause.
        names = ", ".join(map(str, still or late))
        awake = sorted(set(range(self.world_size)) - set(still))
        here = sorted(set(awake) - set(late)) or awake
        if self.rank == here[0]:  # one voice, even if rank 0 is the one that is late
            state = "; its process stands still (stopped, or hanging in the driver)" if still else ""
            print(f"FAIL  {name}: rank {names} had not {verb} it after {self.deadline_s:.0f} s{state}", flush=True)
            print("      → look at that rank's own output and host: is its process alive, its card free (python doctor.py "
                  "there), the same config and interface on each server (HCCL_SOCKET_IFNAME)?", flush=True)  # fmt: skip
        time.sleep(0.5)  # let the others see the same before the launcher ends them
        os._exit(LATE)


def check_collectives(deadline_s: float, max_mib: int, parameters: int) -> bool:
    """Tests this launch's ranks and prints what they found; whether all was right. Every rank calls it."""
    from sft.device import set_environment_defaults

    set_environment_defaults()
    os.environ.setdefault("HCCL_EXEC_TIMEOUT", "68")  # HCCL's own message should come before the process group's
    import torch
    import torch.distributed as dist

    from sft.device import any_card, check_launch, device_name, is_simulated, launch_promise

    meeting = Rendezvous(deadline_s)
    rank, size = meeting.rank, meeting.world_size

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    meeting.meet("start")
    promise = launch_promise()
    on_cpu = promise.kind == "cpu" if promise else not any_card()
    kind = (
        "cpu" if on_cpu or not any_card() else "npu" if hasattr(torch, "npu") and torch.npu.is_available() else "cuda"
    )
    check_launch(promise, kind, size)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if kind != "cpu":
        count = getattr(torch, kind).device_count()
        if local >= count:
            raise UserError(
                f"rank {rank} is process {local} of this server but {count} cards are visible: lower num_processes, or show more cards"
            )
        getattr(torch, kind).set_device(local)
    device = torch.device(kind, local) if kind != "cpu" else torch.device("cpu")
    card = f"{kind}:{local}" if kind != "cpu" else "cpu"
    name = device_name(device) + (" (simulated Ascend)" if is_simulated(device) else "")
    meeting.meet("cards", json.dumps([socket.gethostname(), card, name]))
    places = [json.loads(meeting.store.get(f"cards/{other}")) for other in range(size)]
    for other, place in enumerate(places):
        say(f"ok    rank {other}: host {place[0]}, card {place[1]}, {place[2]}")
    taken = [place[:2] for place in places if kind != "cpu"]
    if any(taken.count(place) > 1 for place in taken):
        say("FAIL  two ranks share a card: lower num_processes to the number of cards")
        return False

    backend = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}[kind]
    timeout = timedelta(seconds=deadline_s + 120)
    meeting.guarded("group", lambda: dist.init_process_group(
        backend, store=dist.PrefixStore("group", meeting.store), rank=rank, world_size=size, timeout=timeout))  # fmt: skip

    def synchronize() -> None:
        if kind != "cpu":
            getattr(torch, kind).synchronize()

    def all_reduce() -> bool:
        tensor = torch.full((1000,), float(rank + 1), device=device)
        dist.all_reduce(tensor)
        return bool((tensor == size * (size + 1) / 2).all())

    def broadcast() -> bool:
        tensor = torch.arange(1000.0, device=device) if rank == 0 else torch.zeros(1000, device=device)
        dist.broadcast(tensor, src=0)
        return bool((tensor.cpu() == torch.arange(1000.0)).all())

    def all_gather() -> bool:
        parts = [torch.empty(8, device=device) for _ in range(size)]
        dist.all_gather(parts, torch.full((8,), float(rank), device=device))
        return [float(part.sum()) for part in parts] == [8.0 * other for other in range(size)]

    def barrier() -> bool:
        dist.barrier(**({"device_ids": [local]} if kind != "cpu" else {}))
        return True

    good = True
    for collective in (all_reduce, broadcast, all_gather, barrier):
        started = time.perf_counter()
        right = meeting.guarded(collective.__name__, lambda collective=collective: (collective(), synchronize())[0])
        seconds = time.perf_counter() - started
        meeting.meet(f"{collective.__name__} value", "right" if right else "wrong")
        wrong = [
            other for other in range(size) if meeting.store.get(f"{collective.__name__} value/{other}") != b"right"
        ]
        good = good and not wrong
        say(
            f"{'FAIL' if wrong else 'ok  '}  {collective.__name__} over {backend}: "
            + (
                f"wrong values on rank {', '.join(map(str, wrong))}"
                if wrong
                else f"right, {1e3 * seconds:.1f} ms with set-up"
            )
        )

    def timed(elements: int) -> float:
        """Median seconds of an all_reduce of so many float32."""
        tensor = torch.zeros(elements, device=device)
        seconds = []
        for _ in range(6):
            synchronize()
            started = time.perf_counter()
            dist.all_reduce(tensor)
            synchronize()
            seconds.append(time.perf_counter() - started)
        return sorted(seconds[1:])[2]

    # Bus bandwidth as in nccl-tests (doc/PERFORMANCE.md): bytes / time × 2 (n − 1) / n, comparable across n.
    if size > 1:
        say("\n  all_reduce       time      bus bandwidth")
        kib = 1
        while kib <= max_mib * 1024:
            seconds = meeting.guarded(f"all_reduce of {kib} KiB", lambda kib=kib: timed(kib * 256))
            label = f"{kib} KB" if kib < 1024 else f"{kib // 1024} MB"
            say(
                f"  {label:>8}  {1e3 * seconds:9.3f} ms  {kib * 1024 / seconds * 2 * (size - 1) / size / 1e9:9.3f} GB/s"
            )
            kib *= 4
        seconds = meeting.guarded("gradients", lambda: timed(parameters))
        say(f"\n  gradients of one step, {parameters:,} × fp32 = {4 * parameters / 1e6:.0f} MB: {1e3 * seconds:.2f} ms")
    meeting.meet("end")
    dist.destroy_process_group()
    say(f"\nVerdict: {size} × {card.split(':')[0]} {'agree' if good else 'do NOT agree'} over {backend}")
    sys.stdout.flush()
    return good

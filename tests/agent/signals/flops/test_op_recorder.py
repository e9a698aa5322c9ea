"""The recording of a step's operators gives way to the script, and leaves nothing behind."""

from __future__ import annotations

import ctypes
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from perfagent.boundary.guard import reset
from perfagent.signals.flops.op_formulas import Operators
from perfagent.signals.flops.op_recorder import Recording, holds_nested
from perfagent.signals.flops.step_flops import StepFlops, own_operations
from perfagent.signals.flops.step_recording import FlopCount
from perfagent.step.state import state


@pytest.fixture(autouse=True)
def no_callback_is_left():
    """One that is left writes into the next profiler of this thread as if that were its own."""
    has_callbacks = ctypes.CDLL(
        str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
    )._ZN2at23hasThreadLocalCallbacksEv
    has_callbacks.restype = ctypes.c_bool
    assert not has_callbacks()
    yield
    assert not has_callbacks()


def recorded_step(model, loss_of):
    """The look at a step after some others."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step():
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    while state.current.probe is not None or state.current.completed < 2:
        step()
    look = FlopCount(state.current, model)
    assert look.at_boundary()
    step()
    assert not look.at_boundary()
    assert not torch.autograd._profiler_enabled()
    return look


def profiled(call):
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        made = call()
    return made, sum(event.name == "aten::mul" for event in profiler.events())


class Profiles(nn.Linear):
    """A model that profiles itself, forward or backward."""

    def __init__(self, where):
        super().__init__(4, 4)
        self.where, self.seen = where, []

    def forward(self, x):
        made = super().forward(x)
        if self.where == "backward":
            made.register_hook(self._double)
            return made
        return self._double(made)

    def _double(self, x):
        made, seen = profiled(lambda: x * 2)
        self.seen.append(seen)
        return made


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_script_that_profiles_in_the_recorded_step_is_not_refused(record, where):
    model, x = Profiles(where), torch.randn(2, 4)
    record(model)
    look = recorded_step(model, lambda m: m(x).sum())
    assert set(model.seen) == {1}
    assert look.broken_off
    flops = StepFlops(lambda: None)
    look.size = (2, 8)
    flops.take(look, model)
    assert not flops._known
    assert not flops.tells, "nor is the next: where it began, ranges are open that lead to what was ours"


@pytest.mark.parametrize("times", [1, 3])
def test_what_is_read_in_parts_leaves_nothing_in_the_way_of_the_script_s_next_profiler(record, times):
    """Profilers in several nodes of one pass, and after it: a callback of ours that stayed would write into them."""
    model, x = nn.Sequential(nn.Linear(4, 4), *(Profiles("backward") for _ in range(times))), torch.randn(2, 4)
    record(model)
    look = recorded_step(model, lambda m: m(x).sum())
    assert look.broken_off
    assert all(set(each.seen) == {1} for each in model[1:])
    assert [profiled(lambda: x * 2)[1] for _ in range(20)] == [1] * 20


def legacy_profile():
    from torch.autograd import profiler_legacy

    return profiler_legacy.profile()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("where", ["forward", "backward", "until the step is over"])
def test_a_profiler_of_the_script_s_that_is_of_the_kind_of_ours_is_left_alone(record, where):
    """It is told from ours by who has begun it."""

    class Own(nn.Linear):
        def forward(self, x):
            made = super().forward(x)
            if where == "backward":
                made.register_hook(self.profiled)
            elif where == "forward":
                self.profiled(made)
            else:
                self.profile = legacy_profile().__enter__()
            return made

        def profiled(self, x):
            with legacy_profile() as profile:
                torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)
                x * 2
            self.seen = sum(event.name == "aten::mul" for event in profile.function_events)

    model, x = Own(4, 4), torch.randn(2, 4)
    record(model)

    def step(m):
        loss = m(x).sum()
        if where == "until the step is over":
            torch.ones(2) * 2
            m.profile.__exit__(None, None, None)
            m.seen = sum(event.name == "aten::mul" for event in m.profile.function_events)
        return loss

    assert recorded_step(model, step).broken_off
    assert model.seen == 1


def test_a_profiler_on_another_thread_that_is_of_the_kind_of_ours_is_not_read(record):
    from threading import Thread

    model, x, told = nn.Linear(4, 4), torch.randn(2, 4), []

    def beside():
        w = torch.randn(1, 1, 4, 4, requires_grad=True)

        def attends(v):
            for _ in range(100):
                v = nn.functional.scaled_dot_product_attention(v, v, v)
            return v

        try:
            with legacy_profile():
                torch.utils.checkpoint.checkpoint(attends, w, use_reentrant=False).sum().backward()
        except Exception as error:
            told.append(error)

    class Beside(nn.Linear):
        def forward(self, x):
            other = Thread(target=beside)
            other.start()
            other.join()
            return super().forward(x)

    model = Beside(4, 4)
    record(model)
    look = recorded_step(model, lambda m: m(x).sum())
    assert not told
    assert not look.broken_off


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_a_model_may_be_scripted_while_it_is_watched_and_in_the_recorded_step(record):
    class Plain(nn.Module):
        """With no annotations of its own: torch.jit.script takes those of nn.Module for it."""

        def __init__(self):
            super().__init__()
            self.first, self.inside, self.scripted = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), None

        def forward(self, x):
            return self.inside(self.first(x))

    class Scripts(nn.Module):
        def __init__(self):
            super().__init__()
            self.plain, self.made = Plain(), []

        def forward(self, x):
            self.made.append(torch.jit.script(self.plain.inside))
            return self.plain(x)

    root, x = Plain(), torch.randn(2, 4)
    run = record(root)
    optimizer = torch.optim.SGD(root.parameters(), lr=0.01)
    for _ in range(3):
        root(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(torch.jit.script(root)(x), root(x))
    run.finish()
    model = Scripts()
    record(model)
    look = recorded_step(model, lambda m: m(x).sum())
    assert torch.equal(model.made[-1](x), model.plain.inside(x))
    assert own_operations(look, None, model).total > 0


@pytest.mark.filterwarnings("ignore")
def test_what_is_compiled_for_the_first_time_in_the_recorded_step_has_no_graph_breaks(record):
    torch._dynamo.reset()

    class Compiles(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.compiled = nn.Linear(4, 4), None

        def attend(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x)

        def forward(self, x):
            made = self.inner(x)
            if torch.autograd._profiler_enabled() and self.compiled is None:
                self.compiled = torch.compile(self.attend, backend="eager", fullgraph=True)
            return made if self.compiled is None else self.compiled(made)

    model, x = Compiles(), torch.randn(1, 2, 4, 4)
    record(model)
    recorded_step(model, lambda m: m(x).sum())
    assert model.compiled is not None
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
def test_backward_passes_that_are_compiled_have_no_hooks_of_ours(record, monkeypatch):
    torch._dynamo.reset()
    calls = []
    monkeypatch.setattr(FlopCount, "_read_in_pass", lambda self, *_: calls.append(1))
    model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), torch.randn(2, 4)
    record(model)
    passes = []

    def loss_of(m):
        loss = m(x).sum()
        if torch.autograd.backward.__qualname__.startswith("FlopCount"):
            passes.append(len(calls))
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
                loss.backward()
            return m(x).sum() * 0
        return loss

    look = recorded_step(model, loss_of)
    assert passes
    assert not look.failed
    torch._dynamo.reset()


def test_what_a_signal_s_handler_raises_in_the_midst_of_reading_costs_that_step_alone(record, monkeypatch):
    model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(40))), torch.randn(2, 4)
    record(model)

    class TimeLimitError(Exception):
        pass

    def handler(*_):
        raise TimeLimitError

    before = signal.signal(signal.SIGUSR2, handler)
    read, times = Operators.read, []

    def interrupted(self, events):
        read(self, events)
        if not times:
            times.append(1)
            signal.raise_signal(signal.SIGUSR2)

    monkeypatch.setattr(Operators, "read", interrupted)

    def loss_of(m):
        try:
            m(x).sum().backward()
        except TimeLimitError:
            times.append(2)
        return m(x).sum()

    try:
        look = recorded_step(model, loss_of)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert times == [1, 2]
    assert look.broken_off
    assert not look.failed


def test_hooks_of_a_graph_that_is_kept_are_gone_with_its_pass(record, monkeypatch):
    model, x, calls = nn.Sequential(*(nn.Linear(4, 4) for _ in range(40))), torch.randn(2, 4), []
    monkeypatch.setattr(FlopCount, "_read_in_pass", lambda self, *_: calls.append(1))
    record(model)

    def keeping(m):
        loss = m(x).sum()
        loss.backward(retain_graph=True)
        before = len(calls)
        torch.autograd.grad(loss, list(m.parameters()))
        assert len(calls) == before
        return m(x).sum()

    recorded_step(model, keeping)
    assert calls


def test_a_profiler_on_another_thread_is_no_reason_to_break_off():
    from threading import Thread

    recording = Recording(compiled=False)
    try:
        other = Thread(target=profiled, args=(lambda: torch.ones(2) * 2,))
        other.start()
        other.join()
        assert torch.autograd._profiler_enabled()
        torch.ones(2, 2) @ torch.ones(2, 2)
    finally:
        threads = recording.end()
    assert "aten::mm" in {event.name() for events in threads for event in events}
    assert not torch.autograd._profiler_enabled()


class Nested(nn.Linear):
    def __init__(self, layout, made):
        super().__init__(4, 4)
        self.layout, self.made = layout, made

    def forward(self, given):
        x = torch.nested.nested_tensor(given, layout=self.layout) if self.made == "inside" else given
        return torch.nested.to_padded_tensor(super().forward(x), 0.0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("made", ["inside", "outside"])
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_have_no_shapes_to_be_asked_for(record, capfd, layout, made):
    """Torch would print a page for each operator."""
    model, rows = Nested(layout, made), [torch.randn(3, 4), torch.randn(2, 4)]
    given = rows if made == "inside" else torch.nested.nested_tensor(rows, layout=layout)
    record(model)
    look = recorded_step(model, lambda m: m(given).square().mean())
    assert look.broken_off
    assert "RecordFunction" not in capfd.readouterr().err


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_found_where_they_are_given():
    nested = torch.nested.nested_tensor([torch.ones(2, 3)], layout=torch.strided)
    assert holds_nested((), {"batch": {"x": nested}})
    assert holds_nested(([torch.ones(1), nested],), {})
    assert not holds_nested((torch.ones(2), None, "text"), {"batch": {"x": torch.ones(2)}})


def test_what_stood_in_the_script_s_way_is_gone_with_the_recording():
    before = torch.nested.nested_tensor, torch.autograd.profiler._enable_profiler
    recording = Recording(compiled=False)
    assert torch.nested.nested_tensor is not before[0]
    recording.end()
    assert before == (torch.nested.nested_tensor, torch.autograd.profiler._enable_profiler)


def test_recordings_on_two_threads_that_end_in_any_order_leave_nothing_behind():
    from threading import Event, Thread

    before = torch.nested.nested_tensor, torch.autograd.profiler._enable_profiler
    begun, other_begun, over = Event(), Event(), Event()

    def first():
        recording = Recording(compiled=False)
        begun.set()
        assert other_begun.wait(10)
        recording.end()
        over.set()

    def second():
        assert begun.wait(10)
        recording = Recording(compiled=False)
        other_begun.set()
        assert over.wait(10)
        recording.end()

    threads = [Thread(target=run) for run in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert before == (torch.nested.nested_tensor, torch.autograd.profiler._enable_profiler)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_somebody_holds_on_to_of_a_recording_that_is_over_breaks_nothing_off():
    recording = Recording(compiled=False)
    held = torch.nested.nested_tensor
    recording.end()
    _, seen = profiled(lambda: (torch.ones(2) * 2, held([torch.ones(2)]), torch.ones(2) * 2))
    assert seen == 2


def test_a_recording_that_cannot_begin_leaves_nothing_behind():
    before = torch.nested.nested_tensor, torch.autograd.profiler._enable_profiler
    recording = Recording(compiled=False)
    with pytest.raises(RuntimeError):
        Recording(compiled=False)
    recording.end()
    assert before == (torch.nested.nested_tensor, torch.autograd.profiler._enable_profiler)


def test_a_recording_that_somebody_ended_does_not_reach_the_training(record, caplog):
    class Ends(nn.Linear):
        def forward(self, x):
            if torch.autograd._profiler_enabled():
                torch._C._autograd._disable_profiler_legacy()
            return super().forward(x)

    model, x = Ends(4, 4), torch.randn(2, 4)
    record(model)
    look = recorded_step(model, lambda m: m(x).sum())
    assert look.failed
    assert "perfagent.signals.flops.step_recording failed and is turned off" in caplog.text
    reset()


def test_a_backward_pass_of_another_thread_is_none_of_the_step(record):
    from threading import Thread

    model, other, x = nn.Linear(4, 4), nn.Linear(64, 64), torch.randn(8, 4)
    record(model)

    def with_another_beside(m):
        loss = m(x).sum()
        beside = Thread(target=lambda: other(torch.randn(32, 64)).sum().backward())
        beside.start()
        beside.join()
        return loss

    alone = own_operations(recorded_step(model, lambda m: m(x).sum()), None, model)
    both = own_operations(recorded_step(model, with_another_beside), None, model)
    assert alone.total == both.total > 0


@pytest.mark.parametrize("around", ["forward", "backward"])
def test_a_step_with_the_script_s_profiler_around_one_of_its_calls_is_not_counted(record, around):
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    record(model)

    def two_micro_steps(m):
        first = profiled(lambda: m(x).sum())[0] if around == "forward" else m(x).sum()
        if around == "backward":
            profiled(first.backward)
        else:
            first.backward()
        return m(x).sum()

    assert recorded_step(model, two_micro_steps).broken_off


def test_a_backward_pass_in_the_root_s_own_call_breaks_nothing_off(record):
    class Inside(nn.Linear):
        def forward(self, x):
            made = super().forward(x)
            made.sum().backward(retain_graph=True)
            return made

    model, x = Inside(4, 4), torch.randn(2, 4)
    record(model)
    assert not recorded_step(model, lambda m: m(x).sum()).broken_off


def names_of(threads):
    return {event.name() for events in threads for event in events}


def test_a_range_that_the_script_names_leads_nowhere_when_it_ends():
    """It would write into a profiler of the script's that began in the midst of it, or since: an abort or a hang in
    some runs."""
    from torch.profiler import record_function

    from perfagent.signals.flops.op_callbacks import are_on_here

    before = record_function.__enter__
    recording = Recording(compiled=False)
    with record_function("a range"):
        made = torch.ones(2, 2) @ torch.ones(2, 2)
        assert are_on_here()
    outlives = record_function("outlives the recording").__enter__()
    with pytest.raises(RuntimeError, match="Expected a value of type 'str'"):
        record_function(3).__enter__()
    assert are_on_here()
    names = names_of(recording.end())
    assert "aten::mm" in names
    assert not {"a range", "outlives the recording"} & names
    assert record_function.__enter__ is before
    assert profiled(lambda: outlives.__exit__(None, None, None) or made * 2)[1] == 1


def test_ranges_of_the_script_s_profiler_are_its_own_again(record):
    class Ranges(nn.Linear):
        def forward(self, x):
            if not torch.autograd._profiler_enabled():
                return super().forward(x)
            with torch.profiler.record_function("around"):  # as DistributedDataParallel's
                self.profile = profile(activities=[ProfilerActivity.CPU])
                self.profile.start()
                with torch.profiler.record_function("inside"):
                    return super().forward(x)

    model, x = Ranges(4, 4), torch.randn(2, 4)
    record(model)

    def loss_of(m):
        loss = m(x).sum()
        if hasattr(m, "profile"):
            m.profile.stop()
            m.seen = {event.key for event in m.profile.key_averages()}
            del m.profile
        return loss

    assert recorded_step(model, loss_of).broken_off
    assert "inside" in model.seen
    assert "aten::addmm" in model.seen
    assert "around" not in model.seen, "it began before"


def test_ranges_on_another_thread_are_left_alone():
    from threading import Thread

    seen = []

    def beside():
        with profile(activities=[ProfilerActivity.CPU]) as own, torch.profiler.record_function("beside"):
            torch.ones(2) * 2
        seen.append({event.key for event in own.key_averages()})

    recording = Recording(compiled=False)
    try:
        other = Thread(target=beside)
        other.start()
        other.join()
    finally:
        recording.end()
    assert "beside" in seen[0]


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_a_function_with_a_range_in_it_can_be_scripted_in_the_recorded_step():
    from torch.profiler import record_function

    def ranged(x: torch.Tensor) -> torch.Tensor:
        with record_function("a range"):
            return x * 2

    recording = Recording(compiled=False)
    try:
        scripted = torch.jit.script(ranged)
    finally:
        recording.end()
    assert torch.equal(scripted(torch.ones(2)), torch.full((2,), 2.0))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("known", [True, False])
def test_a_range_in_what_is_compiled_in_the_recorded_step_breaks_no_graph(known):
    torch._dynamo.reset()

    @torch.compile(backend="eager", fullgraph=True)
    def ranged(x):
        with torch.profiler.record_function("a range"):
            return x * 2

    recording = Recording(compiled=known)
    try:
        assert torch.equal(ranged(torch.ones(2)), torch.full((2,), 2.0))
    finally:
        recording.end()
    torch._dynamo.reset()


def test_where_operators_of_all_threads_are_observed_nothing_is_recorded(record, tmp_path):
    """The script's observer would miss the ranges that are left out."""
    from torch.profiler import ExecutionTraceObserver

    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    record(model)
    observer = ExecutionTraceObserver().register_callback(str(tmp_path / "trace.json"))

    def loss_of(m):
        observer.start()
        loss = m(x).sum()
        observer.stop()
        return loss

    try:
        look = recorded_step(model, loss_of)
    finally:
        observer.unregister_callback()
    assert look.broken_off
    assert not look.operators.get(False)

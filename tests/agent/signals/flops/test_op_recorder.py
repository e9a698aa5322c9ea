"""The recording of a step's operators gives way to the script, and leaves nothing behind."""

from __future__ import annotations

import ctypes
import gc
import signal
import weakref
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
from counted_step import counted_in, counted_step, recorded_step
from torch import nn
from torch.autograd.profiler_legacy import profile as legacy_profile
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, record_function

from perfagent.boundary.guard import reset
from perfagent.signals.flops.op_callbacks import are_on_here
from perfagent.signals.flops.op_recorder import Recording, holds_nested

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.usefixtures("nothing_compiled"),
]
X = torch.randn(2, 4)


@pytest.fixture(autouse=True)
def no_callback_is_left():
    """One that is left writes into the next profiler of this thread as if that were its own."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    has_callbacks = library._ZN2at23hasThreadLocalCallbacksEv
    has_callbacks.restype = ctypes.c_bool
    assert not has_callbacks()
    yield
    assert not has_callbacks()


@pytest.fixture
def recording():
    made = Recording(compiled=False)
    yield made
    if torch.autograd._profiler_enabled():
        made.end()


def loss_of(model):
    return model(X).sum()


def beside(call):
    """Runs it to its end on another thread."""
    errors = []

    def run():
        try:
            call()
        except Exception as error:
            errors.append(error)

    thread = Thread(target=run)
    thread.start()
    thread.join()
    assert not errors


def profiled(call):
    """What the call returns, and how many multiplications the script's profiler saw."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        made = call()
    return made, sum(event.name == "aten::mul" for event in profiler.events())


def multiplications(legacy):
    return sum(event.name == "aten::mul" for event in legacy.function_events)


def in_the_way():
    return torch.nested.nested_tensor, torch.autograd.profiler._enable_profiler, record_function.__enter__


class Linear(nn.Linear):
    """Does something of the script's with its result. backward: when the gradient comes through."""

    def __init__(self, does, *, backward=False):
        super().__init__(4, 4)
        self.does, self.backward = does, backward

    def forward(self, x):
        made = super().forward(x)
        if not self.backward:
            return made if (other := self.does(made)) is None else other
        made.register_hook(self.does)
        return made


# ---- profilers of the script's


@pytest.mark.parametrize(("backward", "times"), [(False, 1), (True, 1), (True, 3)])
def test_a_script_may_profile_in_the_recorded_step(record, backward, times):
    """Also in several nodes of one pass, and after it: a callback of ours that stayed would write into them."""
    seen = []

    def double(x):
        made, count = profiled(lambda: x * 2)
        seen.append(count)
        return made

    model = nn.Sequential(nn.Linear(4, 4), *(Linear(double, backward=backward) for _ in range(times)))
    record(model)
    look = recorded_step(model, loss_of)
    assert set(seen) == {1}
    assert look.broken_off
    assert look.gave_way, "no other step is recorded: where that began, ranges are open that lead to what was ours"
    assert counted_in(look, model).total == 0
    assert [profiled(lambda: X * 2)[1] for _ in range(20)] == [1] * 20


@pytest.mark.parametrize("where", ["forward", "backward", "until the step is over"])
def test_a_profiler_of_the_kind_of_ours_is_left_alone(record, where):
    """It is told from ours by who has begun it."""
    seen, open_ones = [], []

    def does(x):
        if where == "until the step is over":
            open_ones.append(legacy_profile().__enter__())
            return
        with legacy_profile() as own:
            torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)
            x * 2
        seen.append(multiplications(own))

    def loss(m):
        made = loss_of(m)
        while open_ones:
            torch.ones(2) * 2
            open_ones[-1].__exit__(None, None, None)
            seen.append(multiplications(open_ones.pop()))
        return made

    model = Linear(does, backward=where == "backward")
    record(model)
    assert recorded_step(model, loss).broken_off
    assert seen[-1] == 1


def test_profilers_of_other_threads_are_neither_read_nor_a_reason(record):
    def attends(v):
        for _ in range(100):
            v = nn.functional.scaled_dot_product_attention(v, v, v)
        return v

    def legacy():
        w = torch.randn(1, 1, 4, 4, requires_grad=True)
        with legacy_profile():
            torch.utils.checkpoint.checkpoint(attends, w, use_reentrant=False).sum().backward()

    def kineto():
        with profile(activities=[ProfilerActivity.CPU]) as own, record_function("beside"):
            torch.ones(2) * 2
        assert "beside" in {event.key for event in own.key_averages()}, "ranges of other threads are left alone"

    def both(_):
        beside(legacy)
        beside(kineto)

    model = Linear(both)
    record(model)
    look = recorded_step(model, loss_of)
    assert not look.broken_off
    assert counted_in(look, model).total == 2 * (2 * 2 * 4 * 4)


def test_a_backward_pass_of_another_thread_is_none_of_the_step(record):
    model, other = nn.Linear(4, 4), nn.Linear(64, 64)
    record(model)

    def with_another(m):
        loss = loss_of(m)
        beside(lambda: other(torch.randn(32, 64)).sum().backward())
        return loss

    assert counted_step(model, loss_of).total == counted_step(model, with_another).total > 0


@pytest.mark.parametrize("around", ["forward", "backward"])
def test_a_step_with_a_profiler_around_a_call_is_not_counted(record, around):
    model = nn.Linear(4, 4)
    record(model)

    def two_micro_steps(m):
        first = profiled(lambda: loss_of(m))[0] if around == "forward" else loss_of(m)
        if around == "backward":
            profiled(first.backward)
        else:
            first.backward()
        return loss_of(m)

    assert recorded_step(model, two_micro_steps).broken_off


def test_a_backward_pass_in_the_roots_own_call_breaks_nothing_off(record):
    model = Linear(lambda made: made.sum().backward(retain_graph=True))
    record(model)
    assert not recorded_step(model, loss_of).broken_off


def test_where_operators_of_all_threads_are_observed_nothing_is_recorded(record, tmp_path):
    """The script's observer would miss the ranges that are left out."""
    model = nn.Linear(4, 4)
    record(model)
    observer = ExecutionTraceObserver().register_callback(str(tmp_path / "trace.json"))

    def observed(m):
        observer.start()
        loss = loss_of(m)
        observer.stop()
        return loss

    try:
        look = recorded_step(model, observed)
    finally:
        observer.unregister_callback()
    assert look.broken_off
    assert not look.operators.get(False)


# ---- compilers and scripts


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_a_model_may_be_scripted_in_the_recorded_step(record):
    class Plain(nn.Module):
        """With no annotations of its own: torch.jit.script takes those of nn.Module for it."""

        def __init__(self):
            super().__init__()
            self.first, self.inside = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x):
            return self.inside(self.first(x))

    class Scripts(nn.Module):
        def __init__(self):
            super().__init__()
            self.plain, self.made = Plain(), []

        def forward(self, x):
            self.made.append(torch.jit.script(self.plain.inside))
            return self.plain(x)

    root = Plain()
    recorded = record(root)
    counted_step(root, loss_of)
    assert torch.equal(torch.jit.script(root)(X), root(X)), "while it is watched"
    recorded.finish()
    model = Scripts()
    record(model)
    assert counted_step(model, loss_of).total > 0
    assert torch.equal(model.made[-1](X), model.plain.inside(X))


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.usefixtures("recording")
def test_a_function_with_a_range_in_it_can_be_scripted():
    def ranged(x: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function("a range"):
            return x * 2

    assert torch.equal(torch.jit.script(ranged)(torch.ones(2)), torch.full((2,), 2.0))


@pytest.mark.filterwarnings("ignore")
def test_what_is_compiled_in_the_recorded_step_has_no_graph_breaks(record):
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("known", [True, False])
def test_a_range_in_what_is_compiled_breaks_no_graph(known):
    @torch.compile(backend="eager", fullgraph=True)
    def ranged(x):
        with torch.profiler.record_function("a range"):
            return x * 2

    recording = Recording(compiled=known)
    try:
        assert torch.equal(ranged(torch.ones(2)), torch.full((2,), 2.0))
    finally:
        recording.end()


@pytest.mark.filterwarnings("ignore")
def test_backward_passes_that_are_compiled_have_no_hooks_of_ours(record):
    """They would break its graph: an error with `fullgraph`."""
    model, passes = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), []
    record(model)

    def compiled(m):
        if torch.autograd.backward.__qualname__.startswith("FlopCount"):
            passes.append(1)
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
                loss_of(m).backward()
        return loss_of(m)

    look = recorded_step(model, compiled)
    assert passes
    assert not look.failed


# ---- what is left behind


def test_a_signal_handler_that_raises_while_we_read_costs_that_step_alone(record, monkeypatch):
    class TimeLimitError(Exception):
        pass

    def handler(*_):
        raise TimeLimitError

    model, times, read = (
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(40))),
        [],
        torch._C._autograd._disable_profiler_legacy,
    )
    record(model)

    def interrupted(*options):
        events = read(*options)
        if not times:
            times.append("raised")
            signal.raise_signal(signal.SIGUSR2)
        return events

    def limited(m):
        try:
            loss_of(m).backward()
        except TimeLimitError:
            times.append("caught")
        return loss_of(m)

    monkeypatch.setattr(torch._C._autograd, "_disable_profiler_legacy", interrupted)
    before = signal.signal(signal.SIGUSR2, handler)
    try:
        look = recorded_step(model, limited)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert times == ["raised", "caught"]
    assert look.broken_off
    assert not look.failed


def test_hooks_in_a_graph_that_is_kept_are_gone_with_its_pass(record):
    """A hook would hold on to the look that it belongs to."""
    model, kept = nn.Sequential(*(nn.Linear(4, 4) for _ in range(40))), []
    recorded = record(model)

    def keeping(m):
        kept.append(loss_of(m))
        kept[-1].backward(retain_graph=True)
        return loss_of(m)

    gone = weakref.ref(recorded_step(model, keeping))
    recorded.finish()
    gc.collect()
    assert kept
    assert gone() is None


def test_a_recording_puts_back_what_it_replaced():
    before = in_the_way()
    recording = Recording(compiled=False)
    held = torch.nested.nested_tensor
    assert not set(before) & set(in_the_way())
    with pytest.raises(RuntimeError):
        Recording(compiled=False)  # a second one on this thread cannot begin
    recording.end()
    assert in_the_way() == before
    _, seen = profiled(lambda: (X * 2, held([torch.ones(2)]), X * 2))
    assert seen == 2, "what somebody holds on to of it breaks nothing off"


def test_recordings_of_two_threads_may_end_in_any_order():
    before = in_the_way()
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
    assert over.is_set()
    assert in_the_way() == before


def test_a_recording_that_somebody_ended_does_not_reach_the_training(record, caplog):
    def ends(_):
        if torch.autograd._profiler_enabled():
            torch._C._autograd._disable_profiler_legacy()

    model = Linear(ends)
    record(model)
    assert recorded_step(model, loss_of).failed
    assert "step_recording failed" in caplog.text
    reset()


# ---- nested tensors and named ranges


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_have_no_shapes_to_be_asked_for(record, capfd, layout, inside):
    """Torch would print a page for each operator."""

    class Nested(nn.Linear):
        def forward(self, given):
            x = torch.nested.nested_tensor(given, layout=layout) if inside else given
            return torch.nested.to_padded_tensor(super().forward(x), 0.0)

    model, rows = Nested(4, 4), [torch.randn(3, 4), torch.randn(2, 4)]
    given = rows if inside else torch.nested.nested_tensor(rows, layout=layout)
    record(model)
    assert recorded_step(model, lambda m: m(given).square().mean()).broken_off
    assert "RecordFunction" not in capfd.readouterr().err


def test_nested_tensors_are_found_where_they_are_given():
    nested = torch.nested.nested_tensor([torch.ones(2, 3)], layout=torch.strided)
    assert holds_nested((), {"batch": {"x": nested}})
    assert holds_nested(([torch.ones(1), nested],), {})
    assert not holds_nested((torch.ones(2), None, "text"), {"batch": {"x": torch.ones(2)}})


def test_a_range_that_the_script_names_leads_nowhere_when_it_ends(recording):
    """It would write into a profiler of the script's that began in the midst of it, or since: an abort or a hang in
    some runs."""
    with record_function("a range"):
        made = torch.ones(2, 2) @ torch.ones(2, 2)
        assert are_on_here()
    outlives = record_function("outlives the recording").__enter__()
    with pytest.raises(RuntimeError, match="Expected a value of type 'str'"):
        record_function(3).__enter__()
    assert are_on_here()
    names = {event.name() for events in recording.end() for event in events}
    assert "aten::mm" in names
    assert not {"a range", "outlives the recording"} & names
    assert profiled(lambda: outlives.__exit__(None, None, None) or made * 2)[1] == 1


def test_ranges_of_the_scripts_profiler_are_its_own_again(record):
    class Ranges(nn.Linear):
        running, seen = None, ()

        def forward(self, x):
            if not torch.autograd._profiler_enabled():
                return super().forward(x)
            with record_function("around"):  # as DistributedDataParallel's
                self.running = profile(activities=[ProfilerActivity.CPU])
                self.running.start()
                with record_function("inside"):
                    return super().forward(x)

    def loss(m):
        made = loss_of(m)
        if m.running is not None:
            m.running.stop()
            m.seen = {event.key for event in m.running.key_averages()}
            m.running = None
        return made

    model = Ranges(4, 4)
    record(model)
    assert recorded_step(model, loss).broken_off
    assert {"inside", "aten::addmm"} <= model.seen
    assert "around" not in model.seen, "it began before"

"""Names of the stage's parts in a trace."""

import threading

import torch

from commons.distributed.spans import SpanRecorder, span


def test_a_profiler_may_begin_and_end_within_a_span():
    """What such a profiler then knows is what it knows of torch's own spans: in torch 2.11 nothing."""

    def recorded(first, second):
        profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        with first:
            profile.start()
        with second:
            profile.stop()
        return {event.name.rpartition("/")[2] for event in profile.events()} & {"plan", "gather"}

    named = torch.profiler.record_function
    assert recorded(span("plan"), span("gather")) == recorded(named("plan"), named("gather"))


def test_spans_of_other_threads_are_recorded():
    recorder = SpanRecorder()

    def work():
        with span("plan"), span("gather"):
            pass

    def on_a_thread(name):
        thread = threading.Thread(target=work, name=name)
        thread.start()
        thread.join()

    on_a_thread("before")
    recorder.start()
    work()
    on_a_thread("worker")
    recorder.stop()
    on_a_thread("after")
    inner, outer = recorder.spans
    assert (inner.name, outer.name) == ("evenrank/gather", "evenrank/plan")
    assert {inner.thread_name, outer.thread_name} == {"worker"} and inner.thread == outer.thread
    assert outer.began <= inner.began <= inner.ended <= outer.ended

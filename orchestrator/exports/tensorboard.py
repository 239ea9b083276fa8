"""A collected run as TensorBoard's event files.

    folder = write_events(summary, Path("tb"))          tb/<job>/events.out.tfevents....orch
    tensorboard --logdir tb

One folder a run, so that several stand beside each other. What an earlier call wrote there is replaced. The package
`tensorboard` writes them (extra `exports`); torch is not needed.
"""

from __future__ import annotations

from pathlib import Path

from orchestrator.errors import UsageError
from orchestrator.exports.scalars import Scalar, began_at, scalars, settings_words, whole_run
from orchestrator.files import make_folder
from orchestrator.results.summary import Summary

SUFFIX = ".orch"


def write_events(summary: Summary, folder: Path) -> Path:
    """The run's own folder. Raises UsageError where the package is not installed."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary as Values
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise UsageError(
            f"the package tensorboard is not installed here ({error})", "pip install 'orch[exports]'"
        ) from error

    own = folder / summary.job
    make_folder(own)
    before = list(own.glob(f"events.out.tfevents.*{SUFFIX}"))
    began = began_at(summary)
    writer = EventFileWriter(str(own), filename_suffix=SUFFIX)
    last = max((scalar.step for scalar in scalars(summary)), default=0)
    whole = [Scalar(name, last, None, value) for name, value in whole_run(summary).items()]
    for scalar in (*scalars(summary), *whole):
        value = Values.Value(tag=scalar.name, simple_value=scalar.value)
        wall = began + (scalar.seconds or 0.0)
        writer.add_event(Event(step=scalar.step, wall_time=wall, summary=Values(value=[value])))
    writer.add_event(_settings(summary, began))
    writer.close()
    for path in before:
        path.unlink(missing_ok=True)
    return own


def _settings(summary: Summary, began: float) -> object:
    """A table for the page `Text`."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary as Values
    from tensorboard.compat.proto.summary_pb2 import SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    rows = [f"| {key} | {value.replace('|', '&#124;')} |" for key, value in settings_words(summary).items()]
    text = "\n".join(["| setting | value |", "| --- | --- |", *rows])
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    value = Values.Value(
        tag="settings", metadata=metadata, tensor=TensorProto(dtype=DT_STRING, string_val=[text.encode()])
    )
    return Event(step=0, wall_time=began, summary=Values(value=[value]))

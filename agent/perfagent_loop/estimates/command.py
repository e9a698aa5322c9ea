"""`perfagent estimate`: the memory of a training, from a file that describes it or a number of parameters."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from perfagent.errors import ConfigError
from perfagent_loop.checks import check_count

__all__ = ["command"]

_VOCABULARY, _SEQUENCE = 32000, 2048
_EXAMPLES = """
examples:
  perfagent estimate job.py --batch-size 64 --precision bf16      the model and data of a TuningJob (perfagent tune --help)
  perfagent estimate --parameters 7B --lora 16 --quantize nf4     a decoder of about that size, built of nothing
  perfagent estimate --parameters 7B --precision bf16 --zero-stage 3 --world-size 8
  perfagent estimate --config DIR --sequence 4096                 the config.json of a causal language model of transformers

A function of a file may also return (model, batch). The file is imported: it must not train at top level.
  perfagent estimate --demo                                       the model of `perfagent demo`"""


def command(parser: argparse.ArgumentParser) -> None:
    parser.description = "Estimate the memory of a training step on one rank, without running it."
    parser.epilog = _EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    what = parser.add_argument_group("what is trained")
    what.add_argument("file", nargs="?", metavar="FILE.py[:FUNCTION]", help="returns a TuningJob or (model, batch)")
    what.add_argument("--demo", action="store_true", help="the training of `perfagent demo`")
    what.add_argument("--parameters", "--params", metavar="N", help="a decoder of so many parameters, such as 7B")
    what.add_argument("--config", metavar="DIR", help="a folder with the config.json of a transformers model")
    what.add_argument("--layers", type=int, help="of the decoder, with --width and --heads, in place of --parameters")
    what.add_argument("--width", type=int)
    what.add_argument("--heads", type=int)
    what.add_argument("--vocabulary", type=int, help=f"of the decoder (default {_VOCABULARY})")
    what.add_argument("--sequence", type=int, help=f"tokens of a sample of a language model (default {_SEQUENCE})")
    what.add_argument("--batch-size", type=int, help="samples of a micro-step on one rank (default: the job's, or 1)")
    how = parser.add_argument_group("how")
    how.add_argument("--optimizer", help="adamw, sgd, momentum, adafactor, adamw8bit ... (default: the job's or adamw)")
    how.add_argument("--precision", choices=("fp32", "bf16", "fp16"), help="(default: the job's, or fp32)")
    how.add_argument("--zero-stage", type=int, default=0, choices=(0, 1, 2, 3), help="3 is FSDP too")
    how.add_argument("--world-size", type=int, default=1, help="ranks")
    how.add_argument("--grad-accum", type=int, default=1, help="micro-steps of a step")
    checkpointing = "all, every:N or selective"
    how.add_argument("--checkpointing", nargs="?", const="all", default=False, metavar="MODE", help=checkpointing)
    how.add_argument("--lora", type=int, metavar="RANK", help="adapters beside the linear layers, all else frozen")
    how.add_argument("--quantize", choices=("int8", "nf4"), help="of the frozen matrices, with --lora")
    how.add_argument("--device", choices=("cpu", "cuda"), help="whose allocator and optimizers (default: the model's)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.set_defaults(run=lambda arguments: _run(parser, arguments))


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    described = (getattr(arguments, name) for name in ("file", "parameters", "config", "layers", "width", "heads"))
    if not arguments.demo and all(item is None for item in described):
        parser.error("give FILE.py, --parameters N, --config DIR, --layers with --width and --heads, or --demo")
    from perfagent_loop.estimates.memory import estimate_memory

    given = _Given(arguments)
    names = ("zero_stage", "world_size", "checkpointing", "grad_accum", "lora", "quantize", "device")
    options = {name: getattr(arguments, name) for name in names}
    options |= {name: getattr(arguments, name) or getattr(given, name) for name in ("optimizer", "precision")}
    estimate = estimate_memory(given.model, given.batch, **options)
    if arguments.json:
        figures = dataclasses.asdict(estimate) | {"bytes_per_parameter": estimate.bytes_per_parameter}
        print(json.dumps(figures | {"what": given.said}))
    else:
        print(given.said)
        print(estimate)
    return 0


class _Given:
    """The model and batch that the options name."""

    model: Any
    batch: Any
    said: str
    optimizer: Any = "adamw"
    precision: Any = "fp32"

    def __init__(self, arguments: argparse.Namespace) -> None:
        shaped = any(one is not None for one in (arguments.layers, arguments.width, arguments.heads))
        ways = [one is not None for one in (arguments.file, arguments.parameters, arguments.config)]
        if sum([*ways, shaped, arguments.demo]) > 1:
            raise ConfigError("give one of FILE.py, --parameters, --config, --demo, and --layers --width --heads")
        decoder = arguments.parameters is not None or shaped
        language = decoder or arguments.config is not None
        for name, applies in (("batch_size", True), ("sequence", language), ("vocabulary", decoder)):
            value = getattr(arguments, name)
            check_count(f"--{name.replace('_', '-')}", value, or_none=True)
            if value is not None and not applies:
                raise ConfigError(f"--{name} is {value}, and the model with its batches comes from elsewhere")
        arguments.sequence = arguments.sequence or _SEQUENCE
        arguments.vocabulary = arguments.vocabulary or _VOCABULARY
        if decoder:
            self._decoder(arguments)
        elif arguments.config is not None:
            self._config(arguments)
        else:
            self._job(arguments)

    def _decoder(self, arguments: argparse.Namespace) -> None:
        from perfagent_loop.estimates.decoder import Decoder, DecoderShape, count_read, shape_of

        given = {name: getattr(arguments, name) for name in ("layers", "width", "heads", "vocabulary")}
        if arguments.parameters is not None:
            shape = shape_of(count_read(arguments.parameters), vocabulary=arguments.vocabulary)
        elif None not in given.values():
            shape = DecoderShape(**given)
        else:
            raise ConfigError("a decoder's shape takes --layers, --width and --heads")
        self.model = Decoder(shape)
        tokens = self._tokens(arguments)
        self.batch = (tokens, tokens)
        self.said = (
            f"a decoder of {shape.layers} layers, {shape.heads} heads and width {shape.width}, vocabulary {shape.vocabulary}; "
            f"{arguments.batch_size or 1} x {arguments.sequence} tokens"
        )

    def _config(self, arguments: argparse.Namespace) -> None:
        import torch

        try:
            from transformers import AutoConfig, AutoModelForCausalLM
        except ImportError:
            raise ConfigError("--config needs transformers: pip install transformers") from None
        try:
            config = AutoConfig.from_pretrained(arguments.config, local_files_only=True)
        except (OSError, ValueError) as error:
            what = f"{arguments.config!r:.200} holds no configuration of transformers"
            raise ConfigError(f"{what}: {str(error)[:200]}") from None
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call,unused-ignore]
        tokens = self._tokens(arguments)
        self.batch = {"input_ids": tokens, "labels": tokens}
        self.said = f"{type(self.model).__name__}; {arguments.batch_size or 1} x {arguments.sequence} tokens"

    def _tokens(self, arguments: argparse.Namespace) -> Any:
        import torch

        return torch.empty(arguments.batch_size or 1, arguments.sequence, dtype=torch.int64, device="meta")

    def _job(self, arguments: argparse.Namespace) -> None:
        from perfagent_loop.search.job import TuningJob, demo_job, job_from

        made = demo_job() if arguments.demo else job_from(arguments.file)
        source = "the training of `perfagent demo`" if arguments.demo else arguments.file
        if isinstance(made, TuningJob):
            job = made
            self.model, self.optimizer, self.precision = job.with_loss(), job.optimizer, job.precision
            size = arguments.batch_size or job.batch_size
            self.batch = (job.batch(size),)
            self.said = f"{source}: {type(job.model).__name__}, batches of {size}"
        elif isinstance(made, tuple) and len(made) == 2:
            if arguments.batch_size is not None:
                raise ConfigError("--batch-size needs a TuningJob, whose data make a batch; the file returns one")
            self.model, self.batch = made
            self.said = f"{source}: {type(self.model).__name__}"
        else:
            raise ConfigError(f"{source} returns a {type(made).__name__}, no TuningJob, its fields or (model, batch)")

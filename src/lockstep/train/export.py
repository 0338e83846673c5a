"""Trained models as files for other programs: safetensors, torch.export's .pt2, and ONNX.

.pt2 and ONNX files contain a program from `images` [N, C, H, W], for any N >= 1, to `logits` [N, classes]. `images` are
normalized float32 or, with --with-normalization, uint8 pixels. Class names and normalization are stored as metadata:
under "lockstep" in ONNX, in the extra file "lockstep.json" in .pt2.

A file is written under a temporary name, read back and compared with the model on random images before it is renamed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lockstep.data.readers import Normalizer, Placement, scale_and_shift
from lockstep.data.sets import InputSpec
from lockstep.errors import ConfigError, LockstepError, first_line
from lockstep.files.atomic import replacing
from lockstep.run.checkpoints.checkpoint_folder import load_model
from lockstep.run.checkpoints.checkpoint_format import METADATA_KEY
from lockstep.run.checkpoints.checkpoint_format import export as export_weights
from lockstep.run.checkpoints.snapshot import Tensors
from lockstep.train.inference import agree_on_arch, load_network

Format = Literal["safetensors", "torch", "onnx"]
SUFFIXES: dict[Format, str] = {"safetensors": ".safetensors", "torch": ".pt2", "onnx": ".onnx"}
EXTRA_FILE = "lockstep.json"  # inside a .pt2
CHECK_IMAGES = 3  # differs from the example's batch size, to check that the program accepts any
TOLERANCE = 1e-4  # of the largest logit
Run = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Exported:
    """An exported file. `difference`: the largest deviation of a logit from the model's; None: not checked."""

    path: Path
    takes: str
    difference: float | None


class Program(nn.Module):
    """The exported module: a model in evaluation mode, optionally preceded by normalization."""

    def __init__(self, model: nn.Module, spec: InputSpec, with_normalization: bool):
        super().__init__()
        self.model = model.eval()
        self.spec = spec
        self.dtype = torch.uint8 if with_normalization else torch.float32
        self.scale, self.shift = (nn.Buffer(each.float()) for each in scale_and_shift(spec))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.dtype == torch.uint8:
            images = images.float() * self.scale + self.shift
        logits: torch.Tensor = self.model(images)
        return logits

    def random_images(self, count: int) -> torch.Tensor:
        """Return random input images, the same in each call."""
        shape = (count, self.spec.channels, self.spec.height, self.spec.width)
        pixels = torch.randint(
            0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8, device="cpu"
        )
        return pixels if self.dtype == torch.uint8 else Normalizer(self.spec, Placement(torch.device("cpu")))(pixels)

    def describe_input(self) -> str:
        values = "pixels" if self.dtype == torch.uint8 else "normalized"
        kind = str(self.dtype).removeprefix("torch.")
        return f"images [N, {self.spec.channels}, {self.spec.height}, {self.spec.width}], {kind}, {values}"


def default_output(source: Path, kind: Format) -> Path:
    """Return a path in the current folder, named after the run, the checkpoint or the exported file."""
    name = os.path.basename(os.path.abspath(source))
    return Path(f"{name.removesuffix(SUFFIXES['safetensors'])}{SUFFIXES[kind]}")


def export(
    source: Path, kind: Format, output: Path, with_normalization: bool = False, arch: str | None = None
) -> Exported:
    """Export the model of a run folder, a checkpoint or an exported file.

    Args:
        arch: The network named by the user; see `load_network`.

    Raises:
        CheckpointError: The model is missing, damaged, another network, or cannot be built by name.
        ConfigError: The output cannot be written, a flag does not fit the format, or a package is missing.
        LockstepError: The model cannot be exported in this format, or the file's logits differ from the model's.
    """
    if kind == "safetensors" and with_normalization:
        raise ConfigError("--with-normalization needs --format torch or onnx; a safetensors file holds only weights")
    if kind == "onnx":
        missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"--format onnx needs {' and '.join(missing)}, not installed; add them with: "
                f"pip install 'lockstep-torch[onnx]'"
            )
    if output.exists() and (output.is_dir() or (source.exists() and output.samefile(source))):
        raise ConfigError(f"--output {output} is {'a folder' if output.is_dir() else 'CHECKPOINT itself'}; name a file")
    weights, about = load_model(source)
    if arch is not None:
        agree_on_arch(source, str(about.get("arch")), arch)
    try:
        with replacing(output) as partial:
            partial.touch()
            if kind == "safetensors":
                return _write_weights(weights, about, partial, output)
            network = load_network(source, arch)
            program = Program(network.model, network.input, with_normalization)
            write = _write_torch if kind == "torch" else _write_onnx
            return _write_program(program, about, write, partial, output)
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot be written: {error.strerror or error}") from None


def _write_weights(weights: Tensors, about: Mapping[str, Any], partial: Path, output: Path) -> Exported:
    export_weights(partial, weights, about)
    again, _ = load_model(partial)
    same = again.keys() == weights.keys() and all(torch.equal(again[name], weights[name]) for name in weights)
    if not same:
        raise LockstepError(f"{output}: the file read back differs from the weights; check the disk")
    return Exported(output, f"{len(weights)} tensors", 0.0)


def _write_program(
    program: Program,
    about: Mapping[str, Any],
    write: Callable[[Program, str, Path], Run | None],
    partial: Path,
    output: Path,
) -> Exported:
    metadata = json.dumps({**about, "input": asdict(program.spec), "takes": program.describe_input()})
    try:
        run = write(program, metadata, partial)
    except (OSError, LockstepError):
        raise
    except Exception as error:  # torch's exporters do not document which errors they raise
        raise LockstepError(
            f"{about.get('arch', 'the model')} cannot be exported as {output.suffix}: {first_line(error)}"
        ) from error
    images = program.random_images(CHECK_IMAGES)
    with torch.no_grad():
        expected = program(images)
    difference = None if run is None else (run(images) - expected).abs().max().item()
    limit = TOLERANCE * max(1.0, expected.abs().max().item())
    if difference is not None and not difference <= limit:
        raise LockstepError(
            f"{output} was not written: its logits differ from the model's by up to {difference:.2g} (rounding "
            f"explains at most {limit:.2g})"
        )
    return Exported(output, program.describe_input(), difference)


def _capture(program: Program) -> torch.export.ExportedProgram:
    """Return the program's graph for any batch size."""
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    return torch.export.export(program, (program.random_images(2),), dynamic_shapes=shapes)


def _write_torch(program: Program, metadata: str, path: Path) -> Run:
    captured = _capture(program)
    for tensor in [*captured.state_dict.values(), *captured.constants.values()]:
        if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() > tensor.nbytes:
            tensor.data = tensor.data.clone()  # torch saves the whole memory of a slice
    torch.export.save(captured, path, extra_files={EXTRA_FILE: metadata})
    again = torch.export.load(path).module()
    return lambda images: again(images).detach()


def _write_onnx(program: Program, metadata: str, path: Path) -> Run | None:
    exported = torch.onnx.export(
        _capture(program), dynamo=True, verbose=False, input_names=["images"], output_names=["logits"]
    )
    assert exported is not None  # None only without dynamo
    exported.model.metadata_props[METADATA_KEY] = metadata
    exported.save(path, external_data=False)
    if find_spec("onnxruntime") is None:
        return None
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])

"""From a model's name to its work: headers only, on the hub too."""

from __future__ import annotations

from optkit.errors import SourceError
from optkit.model.formats.base import Format
from optkit.model.shape import ModelShape
from optkit.model.task import ENCODING, task_of
from optkit.reports.roofline.work import Work, work_of
from optkit.source.hub import HubRepo
from optkit.source.models import ModelSource, find_model, model_shape


def work_of_model(name: str) -> Work:
    """Return the work of a built-in model, a directory, a .gguf file or a hub id.
    Reads no weight; downloads headers alone.

    Raises SourceError if it is missing, is an ONNX model, or an encoder, which decodes
    nothing.
    """
    shape = shape_of_model(name)
    if task_of(shape.config) in ENCODING:
        what = "an encoder decodes nothing, and its limits are not counted"
        raise SourceError(what, where=name, remedy="Name a causal language model")
    return work_of(shape)


def shape_of_model(name: str) -> ModelShape:
    """Return config and tensors; raises SourceError if the model is missing, or an ONNX one."""
    source = ModelSource(name=name)
    place = find_model(source)
    if isinstance(place, HubRepo):
        return model_shape(source.model_copy(update={"revision": place.commit()}), None)
    if place.is_dir() and not (found := Format.of(place)).is_checkpoint:
        what = f"the weights are in {found.label}, whose work is not counted"
        why = "A graph does not say which of its products a prompt needs for its last token alone"
        raise SourceError(what, where=name, why=why, remedy=f"Name {found.origin}")
    return model_shape(source, None)

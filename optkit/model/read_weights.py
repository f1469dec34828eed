"""Layers whose weight the model's own code reads, beside calling them, or calls in an unusual way.

A packed layer has no such weight. transformers' source is read and not imported, so that a plan
knows these layers too, and those that only its kernels for GPUs read. Names of attributes tell.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from functools import cache
from typing import Any

from optkit.model.config_defaults import code_files, keys_of
from optkit.model.text_config import text_config


class Read(StrEnum):
    """What the model's code does with the weight of a layer that it does not call."""

    COMPUTES = "the model's own code computes with its weight"
    DTYPE = "the model's own code asks for its weight's dtype"
    OPENS = "transformers looks for its weight when it opens the model"
    CLASS = "the model's own code has a class for it, which transformers keeps"
    REPLACED = "transformers puts other modules in the place of its experts as soon as a layer is packed"
    FOUR = "its inputs have four dimensions, and bitsandbytes' products of 8 bits on a CPU take three at most"
    SHARED = "several blocks share its weight, and transformers shares nothing of a packed one"


MODES = frozenset({"training", "slow_but_exact", "rescale_prenorm_residual"})
"""Branches on these are not taken, unless config.json sets them."""
BUILDS = ("__", "extra_repr", "get_", "set_", "tie_", "_tie_")
"""How functions begin that run before a layer is packed, or do not compute."""
PATCHED = "MODULES_TO_PATCH_FOR_QUANTIZATION", "quantizers/base.py"
"""transformers' table of the classes of modules that it replaces in a packed model (Llama 4)."""
SHARED = ".shared_transf"
"""In the names of layers that several blocks of Zamba share."""
UNTOLD = {
    "deepseek_v4": {"wo_a": Read.COMPUTES},
    "prophetnet": {"decoder.layers.self_attn.out_proj": Read.FOUR, "relative_pos_embeddings": Read.FOUR},
}
"""By `model_type` what code does not tell: files have another name, or another function makes four dimensions."""
LINEARS = frozenset({"Linear", "Conv1D"})
ASKED = frozenset({"dtype", "device"})


def reads_of(config: Mapping[str, Any]) -> Callable[[str], frozenset[Read]]:
    """Return a function from a layer's name to what the code of a model type does with its weight."""
    text = text_config(config)
    modes = frozenset(mode for mode in MODES if text.get(mode))
    found = _found(str(text.get("model_type") or config.get("model_type") or ""), modes)

    def reads(name: str) -> frozenset[Read]:
        place_of = re.sub(r"\.\d+", "", f".{name}")
        shared = {Read.SHARED} if SHARED in name else ()
        return frozenset(read for place, read in found if not place or place_of.endswith(f".{place}")).union(shared)

    return reads


@cache
def _found(model_type: str, modes: frozenset[str]) -> frozenset[tuple[str, Read]]:
    """Return ends of names of layers; "" stands for every layer."""
    found = {*UNTOLD.get(model_type, {}).items()}
    for tree in _trees(model_type):
        classes = [each for each in tree.body if isinstance(each, ast.ClassDef)]
        own = {each.name: read for each in classes for read in _of_class(each)}
        if keys_of(*PATCHED) & {each.name for each in classes}:
            found.add(("", Read.REPLACED))
        found |= {(name, own[called]) for name, called in _assigned(tree) if called in own}
        for each in classes:
            for function in each.body:
                if isinstance(function, ast.FunctionDef) and not function.name.startswith(BUILDS):
                    found |= set(_Reads(function, MODES - modes).found)
    return frozenset(found)


@cache
def norm_classes(model_type: str) -> Mapping[str, str]:
    """Return attributes that hold norms in the code of a model type -> the classes of these."""
    pairs = (pair for tree in _trees(model_type) for pair in _assigned(tree))
    return {name: called for name, called in pairs if called.endswith("Norm")}


def _trees(model_type: str) -> list[ast.Module]:
    return [ast.parse(file.read_text(encoding="utf-8")) for file in code_files(model_type, "modeling")]


def _of_class(each: ast.ClassDef) -> Iterator[Read]:
    """Yield what a class of linear layers with a forward of its own does, `x @ weight.T` or another."""
    bases = {ast.unparse(base).rpartition(".")[2] for base in each.bases}
    forward = next((part for part in each.body if isinstance(part, ast.FunctionDef) and part.name == "forward"), None)
    if bases & LINEARS and forward is not None:
        yield Read.CLASS if "@ self.weight.T" in ast.unparse(forward) else Read.COMPUTES


def _assigned(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the attributes that hold a module, and its class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            target, called = node.targets[0], node.value.func
            if isinstance(target, ast.Attribute) and isinstance(called, ast.Name):
                yield target.attr, called.id


class _Reads(ast.NodeVisitor):
    """The weights that a function reads, by the attributes in front of `.weight`."""

    def __init__(self, function: ast.FunctionDef, off: frozenset[str]) -> None:
        self.found: list[tuple[str, Read]] = []
        self.off, self.quantized = off, True
        self.opens = "init" in function.name
        self.of_linears: list[bool] = []
        """Of each class that is asked for around a node: whether it is that of linear layers."""
        self.of_four: set[str] = set()
        """Tensors whose shape is four numbers."""
        self.visit(function)

    def visit_Assign(self, node: ast.Assign) -> None:
        (target, *_), value = node.targets, node.value
        if isinstance(target, ast.Tuple) and len(target.elts) == 4 and ast.unparse(value).endswith(".shape"):
            self.of_four.add(ast.unparse(value).removesuffix(".shape"))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = ast.unparse(node.func).removeprefix("self.")
        if node.args and ast.unparse(node.args[0]) in self.of_four and called.isidentifier():
            self.found.append((called, Read.FOUR))
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        words = set(re.findall(r"\w+", ast.unparse(node.test)))
        if not words & self.off:
            self.of_linears.append(bool(words & LINEARS))
            for each in node.body:
                self.visit(each)
            self.of_linears.pop()
        before = self.quantized
        self.quantized = before and "_is_quantized" not in words  # what follows is for models that are not
        for each in node.orelse:
            self.visit(each)
        self.quantized = before

    def visit_Attribute(self, node: ast.Attribute) -> None:
        inner = node.value
        if node.attr in ASKED and isinstance(inner, ast.Attribute) and inner.attr == "weight":
            if self.quantized:
                self._add(inner, Read.DTYPE)
        elif node.attr == "weight" and isinstance(node.ctx, ast.Load):
            self._add(node, Read.OPENS if self.opens else Read.COMPUTES)
        else:
            self.generic_visit(node)

    def _add(self, weight: ast.Attribute, read: Read) -> None:
        _, _, place = re.sub(r"\[.*?\]", "", ast.unparse(weight.value)).partition(".")
        if place:
            self.found.append((place, read))
        elif self.opens and (not self.of_linears or any(self.of_linears)):
            self.found.append(("", read))

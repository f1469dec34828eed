"""What expressions of optkit's own sources read like: every text that one can become, values as `‹name›`."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

DEPTH = 5
"""Calls that are followed from one text."""
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef


class Scope(NamedTuple):
    """Where an expression stands."""

    module: str
    functions: tuple[ast.FunctionDef | ast.AsyncFunctionDef, ...] = ()
    """The innermost first."""
    names: Mapping[str, tuple[ast.expr, ...]] = {}
    """Name -> all that is assigned to it."""
    given: Mapping[str, tuple[ast.expr, Scope]] = {}
    """Parameter -> what one caller gives for it."""
    depth: int = DEPTH
    owner: str = ""
    """The class."""

    def without(self, name: str) -> Scope:
        """Return this scope without a name, which may be assigned to itself."""
        return self._replace(names={each: value for each, value in self.names.items() if each != name})


class Call(NamedTuple):
    """One call and where it stands."""

    node: ast.Call
    scope: Scope


class Sources:
    """Modules, parsed: their functions and calls by name."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.calls: list[Call] = []
        self.bases: dict[str, str] = {}
        self._functions: defaultdict[str, list[Scope]] = defaultdict(list)
        for module, text in texts.items():
            tree = ast.parse(text)
            self._read(tree, Scope(module, names=_assigned(tree.body)))
        self._calls: defaultdict[str, list[Call]] = defaultdict(list)
        self.validators = {
            name_of(call.node.args[0])
            for call in self.calls
            if name_of(call.node.func).endswith("Validator") and call.node.args
        }
        for call in self.calls:
            self._calls[name_of(call.node.func)].append(call)

    def _read(self, node: ast.AST, scope: Scope) -> None:
        for inner in ast.iter_child_nodes(node):
            here = scope
            if isinstance(inner, FUNCTIONS):
                names = {**scope.names, **_assigned(ast.walk(inner))}
                here = scope._replace(functions=(inner, *scope.functions), names=names)
                self._functions[inner.name].append(here)
            elif isinstance(inner, ast.ClassDef) and inner.bases:
                self.bases[inner.name] = name_of(inner.bases[0])
                here = scope._replace(owner=inner.name)
            elif isinstance(inner, ast.Call):
                self.calls.append(Call(inner, scope))
            self._read(inner, here)

    def functions(self) -> Iterator[Scope]:
        """Return the inside of every function."""
        return (scope for scopes in self._functions.values() for scope in scopes)

    def raised(self, scope: Scope) -> Iterator[str]:
        """Return what the ValueErrors say that can come out of a function."""
        return self._raised(scope.functions[0].body, scope)

    def texts(self, call: Call, parts: Sequence[ast.expr | None]) -> Iterator[tuple[str, ...]]:
        """Return what several arguments of a call read like together, once for each caller of its function if
        they come from there.
        """
        found = [*self._texts(call.scope, parts)]
        if not all(has_words(text) for each in found for part, text in zip(parts, each, strict=True) if part):
            for bound in self._callers(call.scope):
                found += self._texts(call.scope._replace(given=bound), parts)
        yield from found

    def _texts(self, scope: Scope, parts: Sequence[ast.expr | None]) -> Iterator[tuple[str, ...]]:
        first = parts[0]
        assigned = scope.names.get(first.id, ()) if isinstance(first, ast.Name) and first.id not in scope.given else ()
        for value in assigned or (first,):
            here = [value, *(self._assigned_with(value, part, scope) for part in parts[1:])]
            found = [[*dict.fromkeys(self.text(part, scope))] if part else [""] for part in here]
            for index, what in enumerate(found[0]):
                others = (each[index] if len(each) == len(found[0]) else next(iter(each), "") for each in found[1:])
                yield what, *others

    def _assigned_with(self, value: ast.expr | None, part: ast.expr | None, scope: Scope) -> ast.expr | None:
        """Return what was assigned to a name in the statement that assigned `value`, else the name."""
        if isinstance(part, ast.Name) and isinstance(value, ast.Subscript):
            for each in scope.names.get(part.id, ()):
                if isinstance(each, ast.Subscript) and each.value is value.value:
                    return each
        return part

    def text(self, node: ast.expr, scope: Scope) -> Iterator[str]:
        """Return each text that an expression can be."""
        match node:
            case ast.Constant(value=str() as said):
                yield said
            case ast.JoinedStr(values=parts):
                plain = "".join(str(part.value) if isinstance(part, ast.Constant) else _value(part) for part in parts)
                values = [part.value if isinstance(part, ast.FormattedValue) else part for part in parts]
                yield from [plain] if has_words(plain) else self._joined(values, scope)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                yield from self._joined([left, right], scope)
            case ast.IfExp(body=one, orelse=other) | ast.BoolOp(values=[one, other]):
                yield from self.text(one, scope)
                yield from self.text(other, scope)
            case ast.Subscript(value=value, slice=ast.Constant(value=int() | None as index)):
                for element, place in self._elements(value, index, scope):
                    yield from self.text(element, place)
            case ast.Call(func=ast.Name(id="str"), args=[argument]):
                yield from self.text(argument, scope)
            case ast.Call(func=ast.Attribute(attr="format", value=value)):
                yield from self.text(value, scope)
            case ast.Call(
                func=ast.Attribute(attr="join"), args=[ast.GeneratorExp(elt=value) | ast.ListComp(elt=value)]
            ):
                yield from self.text(value, scope)
            case ast.Name(id=name):
                yield from self._named(name, scope)
            case ast.Call():
                yield from self._returned(node, scope)
            case _:
                yield _value(node)

    def _named(self, name: str, scope: Scope) -> Iterator[str]:
        if name in scope.given:
            yield from self.text(*scope.given[name])
        else:
            said = [text for value in scope.names.get(name, ()) for text in self.text(value, scope.without(name))]
            for body in (each for function in scope.functions for each in _tried(function, name)):
                said += self._raised(body, scope)
            for bound in self._callers(scope) if not said and scope.depth else ():
                if name in bound:
                    said += self.text(bound[name][0], bound[name][1]._replace(depth=scope.depth - 1))
            yield from said or [f"‹{name}›"]

    def _joined(self, parts: list[ast.expr], scope: Scope) -> Iterator[str]:
        for texts in product(*([*dict.fromkeys(self.text(part, scope))] for part in parts)):
            yield "".join(texts)

    def _elements(self, node: ast.expr, index: int | None, scope: Scope) -> Iterator[tuple[ast.expr, Scope]]:
        """Return an element of a tuple, of what a function returns or yields; each one if `index` is None."""
        match node:
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                yield from ((each, scope) for each in (elements if index is None else elements[index : index + 1]))
            case ast.Name(id=name):
                for value in scope.names.get(name, ()):
                    yield from self._elements(value, index, scope.without(name))
            case ast.Call(func=ast.Attribute(value=ast.Dict(values=values), attr="get"), args=[_, *otherwise]):
                for value in (*values, *otherwise):
                    yield from self._elements(value, index, scope)
            case ast.Subscript(value=value, slice=ast.Constant(value=int() | None as outer)):
                for element, place in self._elements(value, outer, scope):
                    yield from self._elements(element, index, place)
            case ast.Call():
                for answer, place in self._answers(node, scope):
                    if isinstance(answer, ast.Yield) and index is None and answer.value:
                        yield answer.value, place
                    elif isinstance(answer, ast.Return | ast.YieldFrom) and answer.value:
                        yield from self._elements(answer.value, index, place)

    def _returned(self, node: ast.Call, scope: Scope) -> Iterator[str]:
        answers = [*self._answers(node, scope)]
        for answer, place in answers:
            if isinstance(answer, ast.Return) and answer.value:
                yield from self.text(answer.value, place)
        if not answers:
            yield _value(node)

    def _answers(self, node: ast.Call, scope: Scope) -> Iterator[tuple[ast.Return | ast.Yield | ast.YieldFrom, Scope]]:
        """Return what a called function returns or yields, and where."""
        for each in self._found(name_of(node.func), scope) if scope.depth else ():
            inner = each._replace(given=_bound(node, each.functions[0], scope), depth=scope.depth - 1)
            for statement in ast.walk(each.functions[0]):
                if isinstance(statement, ast.Return | ast.Yield | ast.YieldFrom):
                    yield statement, inner

    def _raised(self, body: list[ast.stmt], scope: Scope) -> Iterator[str]:
        """Return what ValueErrors say that can come out of statements."""
        for node in (inner for statement in body for inner in ast.walk(statement)):
            if isinstance(node, ast.Call):
                if name_of(node.func) == "ValueError" and node.args:
                    yield from self.text(node.args[0], scope)
                for each in self._found(name_of(node.func), scope) if scope.depth else ():
                    inner = each._replace(given=_bound(node, each.functions[0], scope), depth=scope.depth - 1)
                    yield from self._raised(each.functions[0].body, inner)

    def _callers(self, scope: Scope) -> Iterator[dict[str, tuple[ast.expr, Scope]]]:
        """Return what each caller gives to the function around an expression."""
        for owner in scope.functions[:1]:
            for call in self._calls[owner.name]:
                if any(each.functions[0] is owner for each in self._found(owner.name, call.scope)):
                    yield _bound(call.node, owner, call.scope)

    def _found(self, name: str, scope: Scope) -> list[Scope]:
        """Return the functions of a name: of this module, else the only one that has it."""
        known = self._functions.get(name, [])
        here = [each for each in known if each.module == scope.module]
        return here or (known if len(known) == 1 else [])


def name_of(node: ast.expr) -> str:
    """Return the last name of an expression, without what it is called with."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=inner) | ast.Subscript(value=inner) | ast.FormattedValue(value=inner):
            return name_of(inner)
    return ""


def has_words(text: str) -> bool:
    """Say whether a text is more than values."""
    return any(letter.isalpha() for part in text.split("‹") for letter in part.rpartition("›")[2])


def _value(node: ast.expr) -> str:
    return f"‹{name}›" if (name := name_of(node)) else "…"


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [each.arg for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]


def _bound(
    call: ast.Call, function: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope
) -> dict[str, tuple[ast.expr, Scope]]:
    """Return parameter -> what a call gives for it."""
    names = [name for name in _parameters(function) if name not in ("self", "cls")]
    given = dict(zip(names, call.args, strict=False)) | {each.arg: each.value for each in call.keywords if each.arg}
    return {name: (value, scope) for name, value in given.items()}


def _tried(function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> Iterator[list[ast.stmt]]:
    """Return what was tried when an exception of a name was caught."""
    for node in ast.walk(function):
        if isinstance(node, ast.Try) and any(each.name == name for each in node.handlers):
            yield node.body


def _assigned(nodes: Iterator[ast.AST] | list[ast.stmt]) -> dict[str, tuple[ast.expr, ...]]:
    """Return name -> all that assignments and loops give it."""
    found: defaultdict[str, tuple[ast.expr, ...]] = defaultdict(tuple)
    for node in nodes:
        match node:
            case ast.Assign(targets=[target], value=value):
                pass
            case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
                pass
            case ast.For(target=target, iter=each) | ast.comprehension(target=target, iter=each):
                value = ast.Subscript(each, ast.Constant(None))
            case _:
                continue
        names = enumerate(target.elts) if isinstance(target, ast.Tuple) else [(None, target)]
        for index, name in names:
            if isinstance(name, ast.Name):
                found[name.id] += (value if index is None else ast.Subscript(value, ast.Constant(index)),)
    return dict(found)

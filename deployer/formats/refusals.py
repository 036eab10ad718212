"""What an exporter's refusal means: one line in plain words and a class of reason (a key of errors.REASONS)."""

from __future__ import annotations

import re

from deployer.errors import ExportError, first_line
from deployer.formats.provenance import Provenance
from deployer.spec import ModelSpec

#: an operator as torch prints it: aten.foo.default, <OpOverload(op='ns.foo', overload='default')>
_OPERATOR = re.compile(
    r"OpOverload\(op='(?P<quoted>[\w.]+)'|\b(?P<dotted>(?:aten|prims|torchvision|quantized)[.:]+\w+(?:\.\w+)?)"
)
#: torch's words for what it does not follow of Python
_PYTHON = (
    "attempted to call unsupported",
    "graph break",
    "non-function or method super",
    "can't call numpy()",
    "cannot be called on fake tensor",
    ".numpy() is not supported",
    "failed to get source",
    "could not get name of python class",
    "cannot mutate tensors with frozen storage",
)


def explain_export_error(error: Exception, spec: ModelSpec, provenance: Provenance | None = None) -> ExportError:
    """torch.export's refusal: what it means for the model and where it happened.

    `provenance` is what was seen of the axes while exporting; it knows the line that torch's message lacks.
    """
    text = str(error)
    where = _user_line(text)
    if "dynamic shape operator" in text.lower() or "DynamicOutputShape" in type(error).__name__:
        return ExportError(
            f"torch.export cannot tell how many rows an operator returns{where}; return a mask or a count instead",
            reason="data_dependent_size",
        )
    if "data-dependent" in text.lower() or "DataDependent" in type(error).__name__:
        return ExportError(
            f"torch.export cannot follow control flow that depends on tensor values{where}; "
            "use torch.where or torch.cond, or --format torchscript, which scripts it",
            reason="data_dependent_control_flow",
        )
    if found := _specialized(text, spec, provenance or Provenance(), where):
        return ExportError(found, reason="specialized_axis")
    said = f"torch.export refused the model with {type(error).__name__}: {first_line(error)}{where}"
    return ExportError(said, reason=reason_in(error))


def _specialized(text: str, spec: ModelSpec, seen: Provenance, where: str) -> str:
    if found := re.search(r"(?:inferred to be a constant|specialized it to be a constant)\s*\((\d+)\)", text):
        fixed = seen.of(spec, constant=True)
        axis = (fixed and fixed.dim(spec)) or _named_axis(text, spec) or "an axis"
        place = f" ({fixed.line})" if fixed else where
        return (
            f"the model fixes the dynamic axis '{axis}' to {found[1]}{place}: its size is used as a Python number; "
            "use x.shape or a size of -1 in its place"
        )
    if found := re.search(r"in the specified range .*? satisfy the generated guard (.+)", text):
        cut = seen.of(spec, constant=False)
        axis = (cut and cut.dim(spec)) or _named_axis(text, spec) or "an axis"
        place = f" ({cut.line})" if cut else where
        condition = re.sub(r"L\['\w+'\](?:\[\d+\])?\.size\(\)\[\d+\]", axis, found[1]).strip()
        return (
            f"the model takes one path for some sizes of the dynamic axis '{axis}' and another for the rest{place}: "
            f"the program would hold only while {condition}; declare that range in dims, or give all sizes one path"
        )
    return ""


def reason_in(error: BaseException) -> str:
    """The class of reason that an exporter's error tells of, by its class and its words and those of its causes."""
    for link in _chain(error):
        kind, text = type(link).__name__, str(link).lower()
        if kind in ("CppCompileError", "CalledProcessError", "InvalidCxxCompiler"):
            return "compiler_failed"
        if "data-dependent" in text or "DataDependent" in kind:
            return "data_dependent_control_flow"
        if (
            kind in ("DispatchError", "UnsupportedOperatorException", "MissingOperatorWithoutDecomp")
            or "no onnx function found" in text
            or "not_implemented" in text
            or "unknown builtin op" in text
            or "couldn't find storage object" in text
        ):
            return "unsupported_operator"
        if kind in ("Unsupported", "NotSupportedError", "UnsupportedNodeError", "FrontendError") or any(
            words in text for words in _PYTHON
        ):
            return "unsupported_python"
    return "exporter_failed"


def operator_in(error: BaseException) -> str:
    """The name of the first operator that the error or one of its causes names, or ""."""
    for link in _chain(error):
        if found := _OPERATOR.search(str(link)):
            return found["quoted"] or found["dotted"]
    return ""


def _chain(error: BaseException) -> list[BaseException]:
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in links:
        links.append(link)
        link = link.__cause__ or link.__context__
    return links


def _dim_name(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _named_axis(text: str, spec: ModelSpec) -> str | None:
    return next((name for name in spec.dims if re.search(rf"\b{re.escape(_dim_name(name))}\b", text)), None)


def _user_line(text: str) -> str:
    """` (file.py:12)` for the innermost line of the user's model that the message quotes, or nothing."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', text) + re.findall(r"#\s*([\w/.\-]+\.py):(\d+) in", text)
    own = [(file, line) for file, line in frames if "/torch/" not in file and "/deployer/" not in file]
    return f" ({own[-1][0].rsplit('/', 1)[-1]}:{own[-1][1]})" if own else ""

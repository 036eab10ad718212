"""Does a server answer what the model answers? A bundle's own samples over HTTP, in every form, alone and in company.

1. alone: every sample in every form of body, one after the other; each answer held to the eager model's
2. together: the same requests all at once, so that they share runs, with wrong ones among them; each right one must get
   its own answer, each wrong one its own 400 that names its field
3. bits: binary answers of requests sent alone, against the artifact run here on the same input
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import numpy as np

from deployer.bundle import Bundle, read_bundle
from deployer.errors import DeployerError, RequestError, UsageError, first_line
from deployer.hooks import HOOKS_OFF
from deployer.package.probe import BAD_BODY, Probe, judge, judge_refusal, sample_cases
from deployer.protocol import JSON, NPY, NPZ, SAFETENSORS, Encoded, decode_answer, encode_request, oip
from deployer.runtime import open_bundle
from deployer.spec import Arrays, ModelSpec

log = logging.getLogger(__name__)

#: name of a form → (kind of `encode_request`, what is accepted)
_FORMS = {
    "json": (JSON, JSON),
    "npy": (NPY, NPY),
    "npz": (NPZ, NPZ),
    "safetensors": (SAFETENSORS, SAFETENSORS),
    "oip": ("oip", ""),
    "oip-binary": ("oip-binary", ""),
    "json, answered in npz": (JSON, NPZ),
}
_BIT_EXACT = ("npy", "npz", "safetensors", "oip-binary")
_REASONS_KEPT = 10


class ParityReport(msgspec.Struct, frozen=True):
    """`right` of `sent` requests were answered as the eager model answers, `refused` of `wrong` were refused by name;
    `bit_equal` of `bit_compared` answers have the very bits of the artifact run here. `reasons` are the first ten of
    what went wrong; the check has passed where there is none."""

    url: str
    forms: tuple[str, ...]
    sent: int
    right: int
    wrong: int
    refused: int
    bit_equal: int
    bit_compared: int
    reasons: tuple[str, ...]
    notes: tuple[str, ...] = ()
    schema_version: int = 1

    @property
    def passed(self) -> bool:
        return not self.reasons


@dataclass(frozen=True)
class _Ask:
    """One request with what must come back; no `probe` where it must be refused."""

    form: str
    number: int
    request: Encoded
    accept: str
    probe: Probe | None = None


def verify(
    url: str,
    bundle: str | Path | Bundle,
    *,
    token: str | None = None,
    concurrency: int = 16,
    timeout_s: float = 60.0,
    bits: bool = True,
) -> ParityReport:
    """Send the bundle's samples to the model at `url` in every form of body, and judge each answer.

    `concurrency` requests are in flight at once in the second part. With `bits` the artifact is opened here as well.
    Raises UsageError for a URL that is none, BundleError, IntegrityError; never for what the server answers.
    """
    opened = bundle if isinstance(bundle, Bundle) else read_bundle(bundle)
    asks = _asks(opened)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    # trust_env off: a proxy of the environment must see neither the token nor a loopback request
    with httpx.Client(timeout=timeout_s, trust_env=False, headers=headers) as client:
        sender = _Sender(client, url, opened)
        alone = [sender.judge(ask) for ask in asks]
        log.info("parity: %d requests alone, then with wrong ones among them, %d at a time", len(asks), concurrency)
        mixed = _with_wrong_ones(asks)
        with ThreadPoolExecutor(concurrency) as pool:
            together = list(pool.map(sender.judge, mixed))
        bit_equal, bit_compared, notes = sender.compare_bits(asks) if bits else (0, 0, ())
    right = sum(not reason for reason in alone)
    right += sum(not reason for ask, reason in zip(mixed, together, strict=True) if ask.probe is not None)
    wrong = [reason for ask, reason in zip(mixed, together, strict=True) if ask.probe is None]
    reasons = [f"alone, {reason}" for reason in alone if reason] + [
        f"together, {reason}" for reason in together if reason
    ]
    return ParityReport(
        url,
        tuple(dict.fromkeys(ask.form for ask in asks)),
        2 * len(asks),
        right,
        len(wrong),
        sum(not reason for reason in wrong),
        bit_equal,
        bit_compared,
        tuple(reasons[:_REASONS_KEPT]),
        notes,
    )


def _asks(bundle: Bundle) -> list[_Ask]:
    """Every sample in every form that carries it."""
    asks = []
    for number, (arrays, expected) in enumerate(sample_cases(bundle)):
        for form, (kind, accept) in _FORMS.items():
            if not _carries(bundle.spec, arrays, form):
                continue
            request = encode_request(arrays, kind)
            probe = Probe(request.body, request.content_type, accept, arrays, expected)
            asks.append(_Ask(form, number, request, accept, probe))
    return asks


def _carries(spec: ModelSpec, arrays: Arrays, form: str) -> bool:
    """.npy carries one input and one output; JSON neither NaN nor infinity."""
    if form == "npy":
        return (len(spec.inputs), len(spec.outputs)) == (1, 1)
    if _FORMS[form][0] in (JSON, "oip"):
        return all(array.dtype.kind != "f" or bool(np.isfinite(array).all()) for array in arrays.values())
    return True


def _with_wrong_ones(asks: Sequence[_Ask]) -> list[_Ask]:
    """A wrong request after every third right one."""
    mixed: list[_Ask] = []
    for index, ask in enumerate(asks):
        mixed.append(ask)
        if index % 3 == 0:
            mixed.append(_Ask("wrong", index, Encoded(BAD_BODY, JSON), JSON))
    return mixed


class _Sender:
    def __init__(self, client: httpx.Client, url: str, bundle: Bundle) -> None:
        self._client = client
        self._url = url
        self._bundle = bundle

    def post(self, ask: _Ask) -> httpx.Response:
        """Raises UsageError for a URL that is none, httpx.HTTPError where no answer came."""
        headers = {"Content-Type": ask.request.content_type, **ask.request.headers, **HOOKS_OFF}
        if ask.accept:
            headers["Accept"] = ask.accept
        try:
            return self._client.post(self._url, content=ask.request.body, headers=headers)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise UsageError(
                f"'{self._url}' is no URL ({first_line(error)}); give one such as "
                "http://127.0.0.1:8080/predictions/NAME"
            ) from error

    def judge(self, ask: _Ask) -> str:
        """What is wrong with the answer to one request, or nothing."""
        where = f"sample {ask.number} as {ask.form}" if ask.probe is not None else "a wrong request"
        try:
            response = self.post(ask)
        except httpx.HTTPError as error:
            return f"{where}: no answer, {first_line(error) or type(error).__name__}"
        if ask.probe is None:
            reason = judge_refusal(response.status_code, response.content)
        else:
            reason = judge(
                ask.probe, self._bundle, response.status_code, response.content,
                response.headers.get("content-type", ""), response.headers.get(oip.HEADER_LENGTH, ""),
            )  # fmt: skip
        return f"{where}: {reason}" if reason else ""

    def compare_bits(self, asks: Sequence[_Ask]) -> tuple[int, int, tuple[str, ...]]:
        """How many binary answers have the bits of the artifact run here, of how many; and notes."""
        try:
            runner = open_bundle(self._bundle)
        except DeployerError as error:
            return 0, 0, (f"bits were not compared: {error}",)
        equal = compared = 0
        cases = sample_cases(self._bundle)
        with runner:
            for ask in asks:
                if ask.form not in _BIT_EXACT:
                    continue
                expected = runner(_batched(cases[ask.number][0], self._bundle.spec))
                try:
                    response = self.post(ask)
                    length = oip.header_length(response.headers.get(oip.HEADER_LENGTH, ""))
                    content_type = response.headers.get("content-type", "")
                    got: Mapping[str, np.ndarray] = decode_answer(response.content, content_type, length)["outputs"]
                except (httpx.HTTPError, RequestError):
                    continue  # judged already
                names = list(expected) if list(got) != [""] else [""]
                compared += 1
                equal += all(
                    got[name].tobytes() == array.tobytes() for name, array in zip(names, expected.values(), strict=True)
                )
        return equal, compared, ()


def _batched(arrays: Arrays, spec: ModelSpec) -> dict[str, np.ndarray]:
    """One item with its batch axis, as the server runs it; a batch as it is."""
    if all(arrays[tensor.name].ndim == len(tensor.shape) for tensor in spec.inputs):
        return dict(arrays)
    return {
        tensor.name: np.expand_dims(arrays[tensor.name], tensor.shape.index(spec.batch or "")) for tensor in spec.inputs
    }

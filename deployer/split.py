"""A share of the requests for each version of a model, drawn by the client: TorchServe answers every version at a URL
of its own, and nothing has to stand between.

    split = Split.parse("1.0=90,2.0=10")
    url = split.route("http://127.0.0.1:8080/predictions/digits")[split.draw(random.Random(7))]
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

import httpx

from deployer.client import failure
from deployer.errors import ServerError, UsageError, first_line

_CHECK_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Split:
    """Versions and their weights, which need not add up to anything."""

    weights: tuple[tuple[str, float], ...]

    @classmethod
    def parse(cls, text: str) -> Split:
        """`1.0=90,2.0=10`. Raises UsageError."""
        weights: dict[str, float] = {}
        for part in text.split(","):
            version, sign, number = part.strip().partition("=")
            try:
                weight = float(number)
            except ValueError:
                weight = math.nan
            if not (version and sign and math.isfinite(weight) and weight > 0):
                raise UsageError(
                    f"--split '{text}': VERSION=WEIGHT,… is expected, weights above 0, such as 1.0=90,2.0=10"
                )
            if version in weights:
                raise UsageError(f"--split '{text}' names the version {version} twice")
            weights[version] = weight
        return cls(tuple(weights.items()))

    @property
    def shares(self) -> dict[str, float]:
        """The part of all requests that each version gets."""
        total = math.fsum(weight for _, weight in self.weights)
        return {version: weight / total for version, weight in self.weights}

    def draw(self, generator: random.Random) -> str:
        """The version that the next request goes to."""
        versions, weights = zip(*self.weights, strict=True)
        drawn: str = generator.choices(versions, weights)[0]
        return drawn

    def route(self, url: str) -> dict[str, str]:
        """The URL of each version of the model at `url`. Raises UsageError for a URL that names a version already."""
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise UsageError(f"'{url}' is no URL ({first_line(error)})") from error
        segments = [segment for segment in parts.path.split("/") if segment]
        if len(segments) != 2 or segments[0] != "predictions":
            raise UsageError(
                f"--split goes with a model's URL without a version, http://HOST:PORT/predictions/NAME, not '{url}'"
            )
        return {
            version: parts._replace(path=f"/predictions/{segments[1]}/{quote(version)}").geturl()
            for version, _ in self.weights
        }


def check_versions(urls: dict[str, str], token: str | None) -> None:
    """Ask the server for each version, without a run of the model. Raises UsageError for one that it does not have,
    ServerError where it does not answer or refuses the token."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    # trust_env off: a proxy of the environment must see neither the token nor a loopback request
    with httpx.Client(timeout=_CHECK_TIMEOUT_S, trust_env=False, headers=headers) as client:
        for version, url in urls.items():
            try:
                response = client.options(url)
            except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
                raise UsageError(f"'{url}' is no URL ({first_line(error)})") from error
            except httpx.HTTPError as error:
                reason = first_line(error) or type(error).__name__
                raise ServerError(f"nothing answers at {url} ({reason}); `deployer serve` starts a server") from error
            if response.status_code == 404:
                raise UsageError(f"the server has no version {version} of this model ({url}); see `deployer versions`")
            if response.status_code in (400, 401, 403):
                raise failure(response, with_token=bool(token))

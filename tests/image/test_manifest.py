"""Manifests, indexes and configurations from strangers."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.image.errors import ImageError, UnsupportedImageError
from aenv.image.manifest import (
    MalformedImageError,
    diff_ids,
    document,
    image_config,
    is_index,
    manifest,
    select,
)
from tests.image.writer import Image, index_of

D = "sha256:" + "a" * 64
E = "sha256:" + "b" * 64

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from([D, "linux", "amd64"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    *(
                        "manifests",
                        "layers",
                        "config",
                        "digest",
                        "size",
                        "mediaType",
                        "platform",
                        "os",
                        "architecture",
                    ),
                    *("rootfs", "diff_ids", "Env", "Cmd", "Entrypoint", "Labels", "ExposedPorts", "schemaVersion"),
                ]
            ),
            inner,
            max_size=6,
        )
    ),
    max_leaves=20,
)


def entry(digest: str, architecture: str = "amd64", **platform: str) -> dict[str, object]:
    place = {"os": "linux", "architecture": architecture, **platform}
    return {"mediaType": "m", "digest": digest, "size": 1, "platform": place}


def test_the_platform_is_chosen() -> None:
    attestation = {**entry(E), "platform": {"os": "unknown", "architecture": "unknown"}}
    assert select({"manifests": [entry(E, "arm64"), attestation, entry(D)]}).digest == D
    assert select({"manifests": [entry(E, variant="v3"), entry(D)]}).digest == D
    assert select({"manifests": [entry(D, variant="v2")]}).digest == D
    assert select({"manifests": [{"digest": D, "size": 1}]}).digest == D
    with pytest.raises(UnsupportedImageError, match="linux/arm64"):
        select({"manifests": [entry(E, "arm64")]})
    index = json.loads(index_of([Image([b""])]))
    assert is_index(index, "") and not is_index({"layers": [], "config": {}}, "application/json")


def test_what_is_not_an_image_is_refused() -> None:
    with pytest.raises(UnsupportedImageError, match="schema 1"):
        manifest({"schemaVersion": 1, "fsLayers": []})
    chart = {
        "config": {"mediaType": "application/vnd.cncf.helm.config.v1+json", "digest": D, "size": 1},
        "layers": [],
    }
    with pytest.raises(UnsupportedImageError, match="helm"):
        manifest(chart)
    with pytest.raises(MalformedImageError):
        manifest({"config": {"digest": "sha256:../../x", "size": 1}, "layers": []})


def test_configuration() -> None:
    value = {"os": "linux", "architecture": "amd64", "config": {"Env": ["A=1", "B", "=c"], "Cmd": "sh"}}
    config = image_config(value, D)
    assert (config.env, config.cmd, config.working_dir, config.shell) == ({"A": "1"}, ("sh",), "/", ("/bin/sh", "-c"))
    assert image_config({"config": None}, D).entrypoint == ()
    with pytest.raises(UnsupportedImageError, match="windows/amd64"):
        image_config({"os": "windows"}, D)


def test_halves_of_characters_are_no_text() -> None:
    for text in ('{"config": {"User": "\\ud800"}}', '{"config": {"Labels": {"\\udfff": ""}}}'):
        with pytest.raises(MalformedImageError, match="not JSON"):
            document(text.encode(), "image's configuration")
    assert document(b'{"a": "\\ud83d\\ude00"}', "x") == {"a": "\U0001f600"}


@given(values)
def test_nothing_but_typed_errors(value: object) -> None:
    for read in (select, manifest, diff_ids, lambda found: image_config(found, D), lambda found: is_index(found, "")):
        try:
            read(document(json.dumps(value).encode(), "x"))
        except ImageError:
            continue

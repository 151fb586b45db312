"""What of an image's configuration runs in a template, as Docker combines it."""

import pytest

from aenv.image.manifest import ImageConfig
from aenv.template.ready import port_check, readable
from aenv.template.service_command import Service, of_image

E, C = ("/entry", "a b"), ("sh", "-c", "x; y")


@pytest.mark.parametrize(
    ("entrypoint", "cmd", "arguments", "start"),
    [
        (E, C, "", "/entry 'a b' sh -c 'x; y'"),
        (E, (), "", "/entry 'a b'"),
        ((), C, "", "sh -c 'x; y'"),
        (E, C, "'own words'", "/entry 'a b' 'own words'"),
        ((), C, "own", "own"),
        ((), (), "", ""),
    ],
)
def test_entrypoint_and_command(
    entrypoint: tuple[str, ...], cmd: tuple[str, ...], arguments: str, start: str
) -> None:
    found = of_image(ImageConfig("", entrypoint=entrypoint, cmd=cmd), arguments, "")
    assert found.start == start
    assert found.optional == (start != "" and not arguments)


@pytest.mark.parametrize(
    ("ports", "port"),
    [(("80/tcp", "443/tcp"), 80), (("53/udp", "8080"), 8080), (("53/udp",), 0), ((), 0), (("x/tcp", "70000/tcp"), 0)],
)
def test_ready_is_the_first_port(ports: tuple[str, ...], port: int) -> None:
    found = of_image(ImageConfig("", cmd=C, exposed_ports=ports), "", "")
    assert found == Service("sh -c 'x; y'", port_check(port) if port else "", optional=True)
    if port:
        assert readable(f"until {found.ready}") == f"until port {port} is open"


def test_who_asks_when_it_is_ready_wants_it_to_be() -> None:
    assert of_image(ImageConfig("", cmd=C, exposed_ports=("80/tcp",)), "", "true") == Service("sh -c 'x; y'", "true")
    assert of_image(ImageConfig(""), "", "true") == Service("", "true")

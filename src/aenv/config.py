"""Configuration: TOML file, then ``AENV_*`` environment variables, which win."""

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from aenv.errors import InvalidRequestError

DEFAULT_CONFIG_FILE = Path("/etc/aenv/config.toml")


def _split(value: object) -> object:
    """A list written as one word of an environment variable: its parts are separated by commas."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


Words = Annotated[list[str], NoDecode, BeforeValidator(_split)]


class RegistrySettings(BaseModel):
    """How one image registry is reached. In TOML: ``[registries."registry.example.org:5000"]``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    plain_http: bool = Field(default=False, description="Speak HTTP without TLS to it")
    ca_file: Path | None = Field(default=None, description="PEM file of the authority that signed its certificate")
    mirrors: list[str] = Field(
        default_factory=list, description="host[:port][/prefix] asked first, in order; each may have its own settings"
    )
    username: str | None = None
    password: str | None = Field(default=None, repr=False)


class RepositorySettings(BaseModel):
    """Where committed snapshots are kept: a folder, perhaps shared between nodes, or an S3 bucket."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    backend: Literal["posix_fs", "s3"] = Field(default="posix_fs", description="A folder, or a bucket")
    path: Path | None = Field(default=None, description="The folder of posix_fs; `$AENV_HOME/repository` when unset")
    bucket: str | None = Field(default=None, description="Bucket; needed for s3")
    region: str | None = Field(default=None, description="Region of the bucket; needed for s3, never guessed")
    prefix: str = Field(default="", description="Keys begin with it; several repositories may share a bucket")
    endpoint: str | None = Field(default=None, description="http(s)://host[:port] of a server that is not AWS's")
    addressing: Literal["path", "virtual"] = Field(default="path", description="Bucket in the URL's path or its host")
    ca_file: Path | None = Field(default=None, description="PEM file of the authority that signed its certificate")
    access_key_id: str | None = Field(default=None, description="Key; from AWS's usual environment when unset")
    secret_access_key: str | None = Field(default=None, repr=False, description="Secret of the key")
    session_token: str | None = Field(default=None, repr=False, description="Token of temporary keys")
    credential_process: str | None = Field(
        default=None, description="Command that prints keys as JSON, as the AWS CLI defines it; asked again in time"
    )

    @model_validator(mode="after")
    def _complete(self) -> "RepositorySettings":
        if self.backend == "s3" and not (self.bucket and self.region):
            raise ValueError("an s3 repository needs both a bucket and a region")
        if self.endpoint and not self.endpoint.startswith(("http://", "https://")):
            raise ValueError("the endpoint of a repository begins with http:// or https://")
        if bool(self.access_key_id) != bool(self.secret_access_key):
            raise ValueError("access_key_id and secret_access_key of a repository are given both or not at all")
        if self.access_key_id and self.credential_process:
            raise ValueError("a repository has static keys or a credential_process, not both")
        return self


class LimitSettings(BaseModel):
    """What one sandbox may use of the host; 0: as much as it can.

    Firecracker limits its own devices. QEMU's disk is limited by its control group, its network is not.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    disk_bandwidth: int = Field(default=0, ge=0, description="Read and written, MiB per second")
    disk_operations: int = Field(default=0, ge=0, description="Reads and writes per second")
    download_bandwidth: int = Field(default=0, ge=0, description="Received from the network, MiB per second")
    download_packets: int = Field(default=0, ge=0, description="Received from the network, packets per second")
    upload_bandwidth: int = Field(default=0, ge=0, description="Sent to the network, MiB per second")
    upload_packets: int = Field(default=0, ge=0, description="Sent to the network, packets per second")


class Settings(BaseSettings):
    """One node's settings. Sizes are MiB, times are seconds, unless a name says otherwise.

    The TOML file is the one named by ``AENV_CONFIG``, else ``/etc/aenv/config.toml`` when it exists; its keys are
    the field names below, and each field ``x`` can be overridden by ``AENV_X`` (a list: separated by commas; field
    ``y`` of a table ``x``: ``AENV_X__Y``).
    """

    model_config = SettingsConfigDict(
        env_prefix="AENV_", env_ignore_empty=True, env_nested_delimiter="__", extra="forbid"
    )

    home: Path = Field(Path("/var/lib/aenv"), description="State: database, templates, sandboxes' disks")
    runtime: Path = Field(Path("/run/aenv"), description="Transient state: sockets; may be a tmpfs")

    host: str = Field("0.0.0.0", description="Address the API and the proxy listen on")
    port: int = Field(8000, ge=0, le=65535, description="Port the API and the proxy listen on")
    domain: str = Field("localhost", description="Domain of {port}-{sandboxID}.{domain} hosts")
    api_key: str | None = Field(None, description="API key; generated into $AENV_HOME/api-key when unset")

    vmm: Literal["auto", "firecracker", "qemu"] = Field(
        "auto", description="Hypervisor; auto picks the best that works"
    )
    accelerator: Literal["auto", "kvm", "pvm", "tcg"] = Field("auto", description="auto probes by booting the kernel")
    qemu: str = Field("qemu-system-x86_64", description="QEMU system emulator, 10 or newer")
    firecracker: str = Field(
        "firecracker", description="Firecracker; on PATH, or as `aenv-server setup --firecracker` loaded it"
    )
    firecracker_sha256: str | None = Field(
        None,
        pattern=r"^[0-9a-fA-F]{64}$",
        description="Of the archive that `aenv-server setup --firecracker` loads; the published one when unset",
    )
    pvm_kernel: Path | None = Field(None, description="Guest kernel made for PVM hosts (ELF); needed for pvm")
    disk_export: Literal["auto", "ublk", "fuse"] = Field(
        "auto", description="How Firecracker gets a sandbox's disk; auto takes ublk where the kernel has it"
    )
    blockd: Path | None = Field(None, description="aenv-blockd, which serves ublk; found as envd is when unset")
    jail: Literal["auto", "on", "off"] = Field(
        "auto", description="Confinement of hypervisor processes; auto goes on with what this host allows"
    )
    jail_first_user: int = Field(
        1_880_000_000, ge=1000, le=4_000_000_000, description="First of the user ids, one for each running sandbox"
    )
    jail_users: int = Field(65_536, ge=16, le=1 << 24, description="How many user ids")
    cgroup: str = Field("", description="Control group below which the node makes its own, from a hierarchy's root")
    limits: LimitSettings = Field(default_factory=LimitSettings, description="What one sandbox may use of the host")
    kernel: Path | None = Field(None, description="Guest kernel (ELF); taken from its package when unset")
    envd: Path | None = Field(None, description="Guest daemon binary; found beside the package when unset")

    default_vcpus: int | None = Field(None, ge=1, le=32, description="vCPUs of a template; 2 on KVM, 1 on TCG")
    default_memory: int = Field(512, ge=128, le=65536, description="Memory of a template, MiB")
    default_disk: int = Field(4096, ge=1024, le=1 << 20, description="Virtual size of the root disk, MiB")

    max_sandboxes: int = Field(256, ge=1, description="Running sandboxes at once on this node")
    max_fork: int = Field(16, ge=1, le=100, description="Children of one fork call")
    max_timeout: int = Field(24 * 3600, ge=1, description="Longest time to live a caller may ask for, seconds")
    warm_vms: int = Field(4, ge=0, le=64, description="VMM processes spawned ahead, each with its network slot")
    warm_slots: int = Field(16, ge=0, le=256, description="Network slots made ahead")
    start_timeout: float = Field(60.0, gt=0, description="How long a restored guest may take to answer, seconds")
    boot_timeout: float = Field(180.0, gt=0, description="How long a cold boot may take, seconds")
    idle_reclaim: float = Field(
        60.0, ge=0, description="After doing nothing for so long a sandbox's memory goes to the host's swap; 0: never"
    )
    reserve_memory: int = Field(512, ge=0, description="Host memory kept free; below it creation is refused, MiB")
    reserve_disk: int = Field(1024, ge=0, description="Disk kept free under home, MiB")

    slot_cidr: str = Field("10.231.0.0/16", description="Addresses of network slots on the host side")
    slot_prefix: str = Field("aenv", pattern=r"^[a-z][a-z0-9]{0,5}$", description="Prefix of namespaces, interfaces")
    always_allow: Words = Field(default_factory=list, description="Private ranges guests may reach, CIDRs")
    dns: Words = Field(default_factory=lambda: ["1.1.1.1", "8.8.8.8"], description="Guests' resolvers")

    boot_args_allow: Words = Field(
        default_factory=list, description="What extraBootArgs of a cold start may begin with; others are left out"
    )

    registries: dict[str, RegistrySettings] = Field(
        default_factory=dict, description="Settings of image registries, by host[:port]"
    )
    registry_search: Words = Field(
        default_factory=lambda: ["docker.io"], description="Registries that short image names are looked for in"
    )
    registry_allow: Words = Field(
        default_factory=list, description="Registries images may come from (host[:port], * allowed); empty: any"
    )
    docker_config: Path | None = Field(None, description="Docker's config.json; where Docker looks, when unset")
    image_cache: int = Field(20480, ge=0, description="Blobs and converted images kept, MiB; the least used go")

    repository: RepositorySettings = Field(
        default_factory=RepositorySettings, description="Where committed snapshots are kept"
    )

    layer_cache: int = Field(20480, ge=0, description="Blocks of the repository's layers kept on disk, MiB; 0: none")
    layer_memory: int = Field(64, ge=8, description="Blocks that the layer server keeps in its own memory, MiB")

    max_builds: int | None = Field(None, ge=1, le=64, description="Template builds at once; one per core when unset")
    build_timeout: float = Field(3600.0, gt=0, description="Longest time one template build may take, seconds")
    build_cache: int = Field(32, ge=0, le=10000, description="Results of build steps kept; the least used go")
    max_upload: int = Field(1024, ge=1, description="Largest archive of files for a template build, MiB")

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "console", "json"] = Field("auto", description="auto: console on a terminal")
    metrics_interval: float = Field(
        5.0, ge=0, le=3600, description="Between two samples of a sandbox's metrics, seconds; 0: on demand only"
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        named = os.environ.get("AENV_CONFIG")
        file = Path(named) if named else DEFAULT_CONFIG_FILE
        if named and not file.is_file():
            raise InvalidRequestError(f"AENV_CONFIG names {named}, which does not exist.", "Correct or unset it.")
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=file)

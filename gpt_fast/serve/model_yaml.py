"""model_config.yaml as a file, and TorchServe's own keys in it.

TorchServe 0.12 takes what it can use: a key that it does not know is ignored, a value of the wrong type is replaced by
the default with a line in a log, and of a key that is there twice one wins. Here all of that is refused, so that a
typing error is found before a server starts. The ``handler:`` block is settings.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from yaml.reader import ReaderError

from gpt_fast.config import read_keys
from gpt_fast.errors import ConfigError
from gpt_fast.fields import Kind, ListOf, OneOf, Text, Whole, flag, refuse
from gpt_fast.text_files import read_text

NAME = "model_config.yaml"
DAY_S = 86_400
RESPONSE_S = STARTUP_S = 120  # TorchServe's responseTimeout and startupTimeout, where nobody sets them
MAX_FILE_BYTES = 1024 * 1024


# TorchServe 0.12's keys, as its ModelConfig.java reads them. The limits are those of sense, not of the format: what
# lies outside is a mistake in the unit or a digit too many.
TORCHSERVE: Mapping[str, Kind] = {
    **dict.fromkeys(("minWorkers", "maxWorkers"), Whole(1, 256)),
    "batchSize": Whole(1, 65_536),  # requests
    **dict.fromkeys(("jobQueueSize", "maxSequenceJobQueueSize", "maxNumSequence"), Whole(1, 1_000_000)),  # requests
    "maxBatchDelay": Whole(0, 600_000),  # milliseconds
    **dict.fromkeys(("clientTimeoutInMills", "sequenceMaxIdleMSec", "sequenceTimeoutMSec"), Whole(0, 1000 * DAY_S)),
    **dict.fromkeys(("responseTimeout", "startupTimeout"), Whole(1, DAY_S)),  # seconds
    "maxRetryTimeoutInSec": Whole(0, DAY_S),
    "deviceType": OneOf(("cpu", "gpu"), any_case=True),
    "deviceIds": ListOf(Whole(0, 1023), "whole numbers from 0 to 1023", 1),
    "parallelType": OneOf(("tp", "pp", "pptp", "custom"), any_case=True),
    "parallelLevel": Whole(1, 1024),  # processes of a worker
    **dict.fromkeys(("continuousBatching", "sequenceBatching", "asyncCommunication"), flag),
    **dict.fromkeys(("useJobTicket", "useVenv"), flag),
}
# Those of its block ``torchrun:``.
TORCHRUN: Mapping[str, Kind] = {
    **dict.fromkeys(("nnodes", "nproc-per-node", "OMP_NUMBER_THREADS"), Whole(1, 1024)),
    "node-rank": Whole(0, 1023),
    "monitor-interval": Whole(1, 3600),  # seconds
    **dict.fromkeys(("rdzv-backend", "rdzv-endpoint", "rdzv-conf"), Text(1)),
}


def check_torchserve_keys(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for a key outside ``handler:`` that TorchServe would ignore, or a value that it cannot use."""
    read_keys({**TORCHSERVE, "torchrun": _block, "handler": _block_or_none}, config, NAME)
    read_keys(TORCHRUN, config.get("torchrun", {}), f"the torchrun block of {NAME}")
    if config.get("minWorkers", 1) > config.get("maxWorkers", 256):
        raise ConfigError(f"minWorkers in {NAME} must not be more than maxWorkers")


def _block(value: Any, name: str) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else refuse(name, "a block of keys", value)


def _block_or_none(value: Any, name: str) -> Mapping[str, Any] | None:
    return None if value is None else _block(value, name)


def serves_continuously(config: Mapping[str, Any]) -> bool:
    """Which of the two modes ``config`` asks for. Raises ConfigError for other ways of TorchServe to call a handler,
    and for keys that cost clients their answers."""
    for mode in ("asyncCommunication", "sequenceBatching"):
        if config.get(mode):
            raise ConfigError(f"{mode} in {NAME} is not supported; leave it out")
    if config.get("clientTimeoutInMills"):
        why = "TorchServe 0.12 drops the answers that come later, and their clients wait for ever"
        ways = "one_piece_timeout_s, and the field timeout_s of a request, limit the time with a word"
        raise ConfigError(f"clientTimeoutInMills in {NAME} is not supported: {why}. Leave it out; {ways}")
    continuous = bool(config.get("continuousBatching"))
    if continuous and config.get("useJobTicket"):
        why = "TorchServe 0.12 has one ticket for the idle worker and refuses who else comes at that moment"
        raise ConfigError(f"useJobTicket in {NAME} is not supported with continuousBatching: {why}. Leave it out")
    # Where one of the two keys is missing, TorchServe starts a worker for each core or GPU.
    if continuous and (config.get("minWorkers"), config.get("maxWorkers")) != (1, 1):
        why = "an idle second worker stalls the busy one. Leave continuousBatching out to run several workers"
        raise ConfigError(f"continuousBatching needs minWorkers: 1 and maxWorkers: 1 in {NAME}: {why}")
    if not continuous and config.get("batchSize", 1) != 1:
        why = "since requests of one batch would wait for each other"
        raise ConfigError(f"batchSize in {NAME} must be 1 without continuousBatching: true, {why}")
    return continuous


# ---- the file -------------------------------------------------------------------------------------------------------


class ModelYaml(NamedTuple):
    """A file's keys, and ``lines``: the number of the line that each is on, by its path from the top."""

    config: Mapping[str, Any]
    lines: Mapping[tuple[str, ...], int]


def read_model_yaml(path: Path) -> ModelYaml:
    """The keys of the file ``path``. Raises ConfigError with the file and the line for what is not YAML, a key that is
    there twice, an empty file, and a file that is something else than keys and values."""
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is too large to be a {NAME}")
    return parse_model_yaml(read_text(path), str(path))


def parse_model_yaml(text: str, where: str) -> ModelYaml:
    """As :func:`read_model_yaml`, of ``text``; ``where`` names it in errors."""
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            raise ConfigError(f"{where} is empty: it holds no key")
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{where}, line {_line(node)}: must be keys and values, such as 'minWorkers: 1'")
        lines: dict[tuple[str, ...], int] = {}
        _visit(node, (), lines, where)  # before merges and aliases are resolved
        return ModelYaml(loader.construct_document(node), lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}" if mark else ""
        words = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{where}{place}: {words}") from error
    except ReaderError as error:
        number = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{where}, line {number}: {error.reason}") from error
    except ConfigError:
        raise
    except (RecursionError, ValueError) as error:  # nested too deep; a number or a date that is none
        raise ConfigError(f"{where} cannot be read: {error}") from error


def _visit(node: yaml.Node, path: tuple[str, ...], lines: dict[tuple[str, ...], int], where: str) -> None:
    """Note the line of every key of two levels. Raises ConfigError for a key that a block has twice."""
    if not isinstance(node, yaml.MappingNode) or len(path) > 1:
        return
    for key, value in node.value:
        here = (*path, str(key.value))
        if here in lines:
            raise ConfigError(f"{where}, line {_line(key)}: {key.value} is there twice; line {lines[here]} has it too")
        lines[here] = _line(key)
        _visit(value, here, lines, where)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1

import json
from pathlib import Path

import pytest

from tidegate_contract import keys
from tidegate_contract.errors import Reject
from tidegate_sidecar.agent_settings import (
    parse_agent_settings,
)


def test_agent_settings_read_the_operators_file() -> None:
    config = {
        "tiers": {
            "local": [
                {"name": "nvme", "path": "/mnt/nvme", "gid": 64738, "requireMountPoint": True}
            ],
            "remote": [{"name": "pfs", "hostPath": "/mnt/pfs"}, {"name": "c", "claimName": "c"}],
        },
        "gate": {"service": "x"},
    }
    env = {keys.ENV_NODE: "node-1", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    settings = parse_agent_settings(json.dumps(config).encode(), env)
    assert settings.local[0].root == Path("/tidegate/tiers/local/nvme")
    assert settings.local[0].require_mount_point
    assert [tier.host_path for tier in settings.remote] == ["/mnt/pfs", None]


@pytest.mark.parametrize(
    ("config", "env", "want"),
    [
        ("{}", {keys.ENV_NODE: "n", "KUBERNETES_SERVICE_HOST": "h"}, "tiers"),
        ('{"tiers": {}}', {"KUBERNETES_SERVICE_HOST": "h"}, keys.ENV_NODE),
        ('{"tiers": {}}', {keys.ENV_NODE: "n"}, "KUBERNETES_SERVICE_HOST"),
    ],
    ids=["no tiers", "no node", "no API server"],
)
def test_agent_settings_name_what_is_wrong(config: str, env: dict[str, str], want: str) -> None:
    with pytest.raises(Reject, match=want):
        parse_agent_settings(config.encode(), env)

"""Certificates, a token and keys under Ray: probes, the launcher and Serve's own proxy get through, others don't."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from services.launch.local import free_ports
from tests.certificates import Certs
from tests.soak import only_in_soak
from tests.system.ray.launched import SIMULATED, end_and_check, launched
from tests.waiting import WAIT_S, eventually

KEY = "sk-alice-0123456789abcdef"
BODY = {"prompt": "x", "seed": 5, "max_tokens": 20}


@only_in_soak
def test_a_cluster_with_certificates_and_keys(folder: Path, tmp_path: Path) -> None:
    certs = Certs(tmp_path)
    (tmp_path / "keys").write_text(f"alice:{KEY}\n")
    (proxy_port,) = free_ports(1)
    settings = [
        *(f"tls.{name}={path}" for name, path in certs.tls()),
        "target.tls_server_name=outrider-target",  # programs listen at the node's own address
        "draft.tls_server_name=outrider-draft",
        f"router.tls_certificate_file={certs.folder}/router.crt",
        f"router.tls_key_file={certs.folder}/router.key",
        f"router.api_keys_file={tmp_path}/keys",
        f"ray.proxy_port={proxy_port}",
    ]
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    with launched(folder, *SIMULATED, *arguments) as launcher:
        launcher.wait_ready()
        assert "Outrider is ready at https://" in launcher.said
        headers = {"authorization": f"Bearer {KEY}"}
        url = launcher.url.replace("http://", "https://")
        with httpx.Client(verify=certs.context(), headers=headers, timeout=WAIT_S) as client:

            def target() -> dict[str, Any]:
                (entry,) = client.get(f"{url}/health").json()["targets"]
                return dict(entry)

            # The router asks once a second, and may miss an answer of a busy machine.
            assert eventually(lambda: (target()["problem"], target()["num_draft_links"]) == (None, 1))
            direct = client.post(f"{url}/v1/completions", json=BODY)
            proxied = client.post(f"http://127.0.0.1:{proxy_port}/v1/completions", json=BODY)
            assert direct.json()["choices"] == proxied.json()["choices"]
        assert httpx.get(f"http://127.0.0.1:{proxy_port}/v1/models").status_code == 401
        end_and_check(launcher, folder)

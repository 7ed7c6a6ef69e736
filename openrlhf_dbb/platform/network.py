"""Which network interface the processes of a run talk through: that of the address by which Ray knows their host."""

from __future__ import annotations

import os


def use_rays_interface() -> None:
    """Have gloo and NCCL use it in this process, unless the environment names another.

    By themselves they use what the host's name stands for, which /etc/hosts often calls 127.0.1.1.
    """
    import psutil
    import ray

    address = ray.util.get_node_ip_address()
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            if not address.startswith("127."):
                os.environ.setdefault("NCCL_SOCKET_IFNAME", name)

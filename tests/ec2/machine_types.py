"""A few dozen instance types of EC2, as the fake rents them: facts and on-demand prices of us-east-1 (Linux, USD/h).

Not the catalogue that plans are made with: the fake's prices are its own, so that a test can tell the two apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Architecture = Literal["x86_64", "arm64"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineType:
    name: str
    vcpus: int
    memory_mib: int
    gpus: int
    gpu_model: str
    gpu_memory_mib: int
    network: str
    price_usd_per_hour: float
    spot_share: float
    """Of the on-demand price, on average."""
    network_cards: int = 1
    efa_cards: tuple[int, ...] = ()
    """Those that can have an Elastic Fabric Adapter."""

    @property
    def family(self) -> str:
        return self.name.partition(".")[0]

    @property
    def architecture(self) -> Architecture:
        """Graviton's families have a g behind the generation."""
        return "arm64" if self.family in ("g5g", "m7g", "c7g", "t4g") else "x86_64"

    @property
    def placement_strategies(self) -> tuple[str, ...]:
        """Burstable types cannot be in a cluster."""
        return ("partition", "spread") if self.family in ("t3", "t4g") else ("cluster", "partition", "spread")

    @property
    def has_spot(self) -> bool:
        return self.spot_share > 0.0


_ROWS = """
t3.micro          2      1    0  -      0  Up to 5 Gigabit     0.0104    0.35
t3.medium         2      4    0  -      0  Up to 5 Gigabit     0.0416    0.35
t4g.small         2      2    0  -      0  Up to 5 Gigabit     0.0168    0.35
m5.large          2      8    0  -      0  Up to 10 Gigabit    0.096     0.40
m5.xlarge         4     16    0  -      0  Up to 10 Gigabit    0.192     0.40
m7i.large         2      8    0  -      0  Up to 12.5 Gigabit  0.1008    0.42
m7i-flex.large    2      8    0  -      0  Up to 12.5 Gigabit  0.09576   0.42
m7i.xlarge        4     16    0  -      0  Up to 12.5 Gigabit  0.2016    0.42
m7i.2xlarge       8     32    0  -      0  Up to 12.5 Gigabit  0.4032    0.42
m7g.large         2      8    0  -      0  Up to 12.5 Gigabit  0.0816    0.40
c5.xlarge         4      8    0  -      0  Up to 10 Gigabit    0.17      0.40
c7i.large         2      4    0  -      0  Up to 12.5 Gigabit  0.08925   0.40
c7i.xlarge        4      8    0  -      0  Up to 12.5 Gigabit  0.1785    0.40
c7i.4xlarge      16     32    0  -      0  Up to 12.5 Gigabit  0.714     0.40
c7g.xlarge        4      8    0  -      0  Up to 12.5 Gigabit  0.145     0.40
g4dn.xlarge       4     16    1  T4     16384  Up to 25 Gigabit    0.526     0.32
g4dn.2xlarge      8     32    1  T4     16384  Up to 25 Gigabit    0.752     0.33
g4dn.4xlarge     16     64    1  T4     16384  Up to 25 Gigabit    1.204     0.33
g4dn.8xlarge     32    128    1  T4     16384  50 Gigabit          2.176     0.33
g4dn.12xlarge    48    192    4  T4     16384  50 Gigabit          3.912     0.34
g4dn.16xlarge    64    256    1  T4     16384  50 Gigabit          4.352     0.34
g5.xlarge         4     16    1  A10G   24576  Up to 10 Gigabit    1.006     0.42
g5.2xlarge        8     32    1  A10G   24576  Up to 10 Gigabit    1.212     0.42
g5.4xlarge       16     64    1  A10G   24576  Up to 25 Gigabit    1.624     0.42
g5.8xlarge       32    128    1  A10G   24576  25 Gigabit          2.448     0.40
g5.12xlarge      48    192    4  A10G   24576  40 Gigabit          5.672     0.45
g5.24xlarge      96    384    4  A10G   24576  50 Gigabit          8.144     0.45
g5.48xlarge     192    768    8  A10G   24576  100 Gigabit        16.288     0.40
g5g.xlarge        4      8    1  T4g    16384  Up to 10 Gigabit    0.42      0.35
g6.xlarge         4     16    1  L4     24576  Up to 10 Gigabit    0.8048    0.45
g6.2xlarge        8     32    1  L4     24576  Up to 10 Gigabit    0.9776    0.45
g6.12xlarge      48    192    4  L4     24576  40 Gigabit          4.6016    0.44
g6.48xlarge     192    768    8  L4     24576  100 Gigabit        13.3504    0.44
g6e.xlarge        4     32    1  L40S   49152  Up to 20 Gigabit    1.861     0.52
p3.2xlarge        8     61    1  V100   16384  Up to 10 Gigabit    3.06      0.30
p3.8xlarge       32    244    4  V100   16384  10 Gigabit         12.24      0.30
p3.16xlarge      64    488    8  V100   16384  25 Gigabit         24.48      0.30
p3dn.24xlarge    96    768    8  V100   32768  100 Gigabit        31.212     0.30
p4d.24xlarge     96   1152    8  A100   40960  400 Gigabit        21.957642  0.40
p4de.24xlarge    96   1152    8  A100   81920  400 Gigabit        27.44705   0.40
p5.48xlarge     192   2048    8  H100   81920  3200 Gigabit       55.04      0.40
"""


FREE_PLAN = frozenset(f"{family}.{size}" for family in ("t3", "t4g") for size in ("micro", "small")) | {
    "c7i-flex.large",
    "m7i-flex.large",
}
"""All that an account on the Free plan may launch (accounts since 2025-07-15)."""
_EFA_CARDS = {
    **dict.fromkeys(("g4dn.8xlarge", "g4dn.12xlarge", "g4dn.16xlarge", "p3dn.24xlarge"), 1),
    **dict.fromkeys(("g5.8xlarge", "g5.12xlarge", "g5.24xlarge", "g5.48xlarge", "g6.12xlarge", "g6.48xlarge"), 1),
    "p4d.24xlarge": 4,
    "p4de.24xlarge": 4,
    "p5.48xlarge": 32,
}
"""How many network cards a type has, where each can have an EFA (EC2 User Guide, "Elastic Fabric Adapter")."""


def _parsed(row: str) -> MachineType:
    name, vcpus, memory_gib, gpus, model, gpu_memory_mib, *network, price, share = row.split()
    return MachineType(
        name=name,
        vcpus=int(vcpus),
        memory_mib=int(memory_gib) * 1024,
        gpus=int(gpus),
        gpu_model=model if int(gpus) else "",
        gpu_memory_mib=int(gpu_memory_mib),
        network=" ".join(network),
        price_usd_per_hour=float(price),
        spot_share=float(share),
        network_cards=_EFA_CARDS.get(name, 1),
        efa_cards=tuple(range(_EFA_CARDS.get(name, 0))),
    )


MACHINE_TYPES = {parsed.name: parsed for parsed in map(_parsed, _ROWS.strip().splitlines())}


def as_described(machine: MachineType) -> dict[str, Any]:
    """One of DescribeInstanceTypes' InstanceTypes."""
    described: dict[str, Any] = {
        "InstanceType": machine.name,
        "ProcessorInfo": {"SupportedArchitectures": [machine.architecture]},
        "VCpuInfo": {"DefaultVCpus": machine.vcpus, "DefaultCores": max(1, machine.vcpus // 2)},
        "MemoryInfo": {"SizeInMiB": machine.memory_mib},
        "PlacementGroupInfo": {"SupportedStrategies": list(machine.placement_strategies)},
        "NetworkInfo": {
            "NetworkPerformance": machine.network,
            "NetworkCards": [_as_card(machine, index) for index in range(machine.network_cards)],
            "EfaSupported": bool(machine.efa_cards),
        },
    }
    if machine.efa_cards:
        described["NetworkInfo"]["EfaInfo"] = {"MaximumEfaInterfaces": len(machine.efa_cards)}
    if machine.gpus:
        one = {"Name": machine.gpu_model, "Manufacturer": "NVIDIA", "Count": machine.gpus}
        total_mib = machine.gpus * machine.gpu_memory_mib
        memory = {"MemoryInfo": {"SizeInMiB": machine.gpu_memory_mib}}
        described["GpuInfo"] = {"Gpus": [{**one, **memory}], "TotalGpuMemoryInMiB": total_mib}
    return described


def _as_card(machine: MachineType, index: int) -> dict[str, Any]:
    fabric = ["efa", "efa-only"] if index in machine.efa_cards else []
    return {"NetworkCardIndex": index, "MaximumNetworkInterfaces": 4, "InterfaceTypes": ["interface", *fabric]}

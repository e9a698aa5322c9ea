"""Trees of files as the kernel's drivers for AMD and Intel GPUs make them, below a folder of a test.

No card was at hand. Names, units and forms are from the kernel's documentation and from listings that programs keep
for their tests; each builder says which:

- sysfs, hwmon of amdgpu: Documentation/gpu/amdgpu/thermal.rst (comments "DOC: hwmon", "gpu_busy_percent",
  "mem_busy_percent" in drivers/gpu/drm/amd/pm/amdgpu_pm.c)
- RAS: "DOC: AMDGPU RAS sysfs Error Count Interface" and "gpu_vram_bad_pages Interface" (amdgpu_ras.c)
- i915, xe: Documentation/ABI/testing/sysfs-driver-intel-i915-hwmon, -xe-hwmon; drivers/gpu/drm/xe/xe_gt_freq.c,
  i915/gt/intel_gt_sysfs_pm.c
- fdinfo: Documentation/gpu/drm-usage-stats.rst; the example in drivers/gpu/drm/xe/xe_drm_client.c
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["Machine", "write"]


class Machine:
    """sys: stands for /sys; process: for /proc/self."""

    def __init__(self, root: Path) -> None:
        self.sys, self.process = root / "sys", root / "self"
        (self.sys / "class/drm").mkdir(parents=True)
        for name in ("fd", "fdinfo"):
            (self.process / name).mkdir(parents=True)
        self._cards = 0

    def card(self, pci: str, driver: str, pci_id: str, files: Mapping[str, str | bytes]) -> Path:
        """The folder of its PCI device. "CARD" in a name of `files` is its folder of /sys/class/drm."""
        name, self._cards = f"card{self._cards}", self._cards + 1
        folder = self.sys / f"devices/pci0000:00/0000:00:{31 - self._cards:02x}.0" / pci  # behind a bridge
        connector = folder / "drm" / name / f"{name}-DP-1"
        connector.mkdir(parents=True)
        write(folder, {"uevent": f"DRIVER={driver}\nPCI_CLASS=30000\nPCI_ID={pci_id}\nPCI_SLOT_NAME={pci}\n"})
        write(folder, {file.replace("CARD", f"drm/{name}"): content for file, content in files.items()})
        (folder / "drm" / name / "device").symlink_to(folder)
        (connector / "device").symlink_to(folder / "drm" / name)
        for link, target in ((name, folder / "drm" / name), (connector.name, connector)):
            (self.sys / "class/drm" / link).symlink_to(target)
        return folder

    def mi300x(self, pci: str = "0000:0c:00.0", *, partition: str = "SPX", unique_id: str = "a1b2c3d4e5f60718") -> Path:
        """MI300X: no edge sensor, power1_input in place of the average (amdgpu_pm.c: hwmon_attributes_visible)."""
        return self.card(pci, "amdgpu", "1002:74A1", {
            "unique_id": f"{unique_id}\n", "product_name": "AMD Instinct MI300X OAM\n",
            "current_compute_partition": f"{partition}\n", "power/runtime_status": "active\n",
            "gpu_busy_percent": "87\n", "mem_busy_percent": "35\n", "pcie_replay_count": "2\n",
            "mem_info_vram_total": "206141652992\n", "mem_info_vram_used": "150323855360\n",
            "hwmon/hwmon4/name": "amdgpu\n", "hwmon/hwmon4/power1_input": "652000000\n",
            "hwmon/hwmon4/power1_cap": "750000000\n", "hwmon/hwmon4/freq1_input": "2104000000\n",
            "hwmon/hwmon4/freq2_input": "1300000000\n",
            "hwmon/hwmon4/temp2_label": "junction\n", "hwmon/hwmon4/temp2_input": "71000\n",
            "hwmon/hwmon4/temp3_label": "mem\n", "hwmon/hwmon4/temp3_input": "58000\n",
            "ras/umc_err_count": "ue: 1\nce: 40\nde: 3\n", "ras/gfx_err_count": "ue: 0\nce: 2\n",
            "ras/gpu_vram_bad_pages": "0x00000001 : 0x00001000 : R\n0x00000002 : 0x00001000 : P\n",
        })  # fmt: skip

    def radeon(self, pci: str = "0000:03:00.0") -> Path:
        """A Radeon RX 7900 XTX: three sensors, a fan; the error counters of newer kernels (`aca_umc`: amd-smi reads it
        where umc_err_count is missing)."""
        return self.card(pci, "amdgpu", "1002:744C", {
            "gpu_busy_percent": "5\n", "mem_info_vram_total": "25753026560\n", "mem_info_vram_used": "0\n",
            "hwmon/hwmon2/name": "amdgpu\n", "hwmon/hwmon2/power1_average": "45000000\n",
            "hwmon/hwmon2/freq1_input": "0\n", "hwmon/hwmon2/pwm1": "51\n",
            "hwmon/hwmon2/temp1_label": "edge\n", "hwmon/hwmon2/temp1_input": "52000\n",
            "hwmon/hwmon2/temp2_label": "junction\n", "hwmon/hwmon2/temp2_input": "66000\n",
            "hwmon/hwmon2/temp3_label": "mem\n", "hwmon/hwmon2/temp3_input": "70000\n",
            "ras/aca_umc": "ue: 4\nce: 0\n",
        })  # fmt: skip

    def arc(self, pci: str = "0000:03:00.0") -> Path:
        """An Arc A770 with i915."""
        return self.card(pci, "i915", "8086:56A0", {
            "hwmon/hwmon3/name": "i915\n", "hwmon/hwmon3/energy1_input": "1000000000\n",
            "hwmon/hwmon3/power1_max": "190000000\n", "hwmon/hwmon3/temp1_input": "61000\n",
            "hwmon/hwmon1/name": "i915_gt0\n", "hwmon/hwmon1/energy1_input": "7\n",
            "CARD/gt/gt0/rps_act_freq_mhz": "2400\n",
        })  # fmt: skip

    def battlemage(self, pci: str = "0000:04:00.0") -> Path:
        """An Arc B580 with xe: power1 and energy1 are the card's, power2 and energy2 the package's."""
        return self.card(pci, "xe", "8086:E20B", {
            "hwmon/hwmon6/name": "xe\n", "hwmon/hwmon6/energy1_input": "500000000\n", "hwmon/hwmon6/energy1_label": "card\n",
            "hwmon/hwmon6/energy2_input": "400000000\n", "hwmon/hwmon6/energy2_label": "pkg\n",
            "hwmon/hwmon6/power1_max": "0\n", "hwmon/hwmon6/power2_max": "120000000\n",
            "hwmon/hwmon6/temp2_label": "pkg\n", "hwmon/hwmon6/temp2_input": "55000\n",
            "hwmon/hwmon6/temp3_label": "vram\n", "hwmon/hwmon6/temp3_input": "60000\n",
            "tile0/physical_vram_size_bytes": "12884901888\n", "tile0/gt0/freq0/act_freq": "2850\n",
        })  # fmt: skip

    def opens(self, number: int, pci: str, driver: str, client: int, **keys: str) -> None:
        """This process has the device open; keys: what follows "drm-", with _ for -."""
        lines = {"pos": "0", "drm-driver": driver, "drm-pdev": pci, "drm-client-id": str(client)}
        lines |= {f"drm-{key.replace('_', '-')}": value for key, value in keys.items()}
        link = self.process / "fd" / str(number)
        link.unlink(missing_ok=True)
        link.symlink_to("/dev/dri/renderD128")
        write(self.process / "fdinfo", {str(number): "".join(f"{key}:\t{value}\n" for key, value in lines.items())})


def write(folder: Path, files: Mapping[str, str | bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

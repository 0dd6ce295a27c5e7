"""What this machine does: the trainer's device, memory, cores, battery."""

from __future__ import annotations

from textual.content import Content

from spes_p2p.client.output import duration_text
from spes_p2p.client.ui.panel import Panel, bar, fit, limit_lines
from spes_p2p.node.snapshot import GpuView, MachineView, NodeSnapshot
from spes_p2p.units import bytes_text

NAME_WIDTH = 10
MAX_BAR = 40
FIGURE_WIDTH = 22
LIMITS = frozenset({"hours", "idle_only", "pause_on_battery", "gpu_share", "gpu_power"})


class MachinePanel(Panel):
    """A bar per resource, and the figures that have none."""

    BORDER_TITLE = "Machine"

    def watch_snapshot(self, snapshot: NodeSnapshot | None) -> None:
        """The title names the device."""
        if snapshot is not None:
            self.border_title = f"Machine · trains on {snapshot.machine.device}"

    def draw(self, snapshot: NodeSnapshot, width: int, height: int) -> list[Content]:
        """The scarcest first; what is not known is not shown."""
        machine = snapshot.machine
        lines = [line for gpu in machine.gpus for line in _gpu_lines(gpu, width)]
        lines += _host_lines(machine, width)
        lines += limit_lines(snapshot.limits, LIMITS, width)
        restarts = machine.trainer_restarts
        if restarts:
            times = "once" if restarts == 1 else f"{restarts} times"
            lines.append(Content.styled(fit(f"the trainer was started again {times}", width), "bold $text-warning"))
        else:
            lines.append(Content(fit("the trainer was never started again", width)))
        lines.append(Content.styled(fit(f"up for {duration_text(snapshot.started_ms_ago)}", width), "dim"))
        lines.append(Content.styled(fit(f"spes-p2p {snapshot.version}, run {snapshot.run_name}", width), "dim"))
        return lines[: max(height, 1)]


def _gpu_lines(gpu: GpuView, width: int) -> list[Content]:
    lines = [Content.styled(fit(f"GPU {gpu.number}  {gpu.name}", width), "bold")]
    if gpu.memory_bytes is not None and gpu.memory_total_bytes:
        lines.append(_share_line("memory", gpu.memory_bytes, gpu.memory_total_bytes, width))
    if gpu.use_percent is not None:
        lines.append(_bar_line("use", gpu.use_percent / 100, f"{gpu.use_percent} %", width))
    figures = []
    if gpu.temperature_c is not None:
        figures.append(f"{gpu.temperature_c} °C")
    if gpu.power_w is not None:
        limit = f" of {gpu.power_limit_w:.0f} W" if gpu.power_limit_w else " W"
        figures.append(f"{gpu.power_w:.0f}{limit}")
    if figures:
        lines.append(Content(fit(f"{'':<{NAME_WIDTH}} {'  '.join(figures)}", width)))
    return lines


def _host_lines(machine: MachineView, width: int) -> list[Content]:
    lines = []
    if machine.cpu_percent is not None:
        figure = f"{machine.cpu_percent:.0f} % of {machine.num_cores} cores"
        lines.append(_bar_line("CPU", machine.cpu_percent / 100, figure, width))
    if machine.ram_total_bytes:
        lines.append(_share_line("RAM", machine.ram_bytes, machine.ram_total_bytes, width))
    mine = f"{'this node':<{NAME_WIDTH}} {bytes_text(machine.memory_bytes)}"
    if machine.cores_used is not None:
        mine += f", {machine.cores_used:.1f} cores"
    lines.append(Content(fit(mine, width)))
    if machine.battery_percent is not None:
        how = "on battery" if machine.on_battery else "plugged in"
        figure = f"{machine.battery_percent:.0f} %, {how}"
        lines.append(_bar_line("battery", machine.battery_percent / 100, figure, width))
    return lines


def _share_line(name: str, part: int, whole: int, width: int) -> Content:
    return _bar_line(name, part / whole, f"{bytes_text(part)} of {bytes_text(whole)}", width)


def _bar_line(name: str, share: float, figure: str, width: int) -> Content:
    bar_width = max(min(width - NAME_WIDTH - FIGURE_WIDTH - 2, MAX_BAR), 6)
    return Content(fit(f"{name:<{NAME_WIDTH}} {bar(share, bar_width)} {figure}", width))

"""Data sheets of typical PCs with one GPU. Each GPU is combined with a computer of its time."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Computer:
    """Data sheet of a PC without its GPU. Rates are decimal (GB/s, GHz), memory is in GiB."""

    cpu_model: str
    n_cores: int
    ghz: float  # sustained clock with all cores busy
    vector_bytes: int  # width of the widest integer vector instructions, in bytes
    has_dot: bool  # whether one instruction multiplies bytes and adds (VNNI)
    ram_gib: int
    ram_gb_s: float
    disk_gb_s: float  # read rate of a typical drive of that year


@dataclass(frozen=True, slots=True)
class DataSheet(Computer):
    """Data sheet of a PC with its GPU. Rates are decimal (GB/s, TFLOPS), memory is in GiB."""

    name: str
    gpu_model: str
    vram_gib: int
    vram_gb_s: float
    fp32_tflops: float
    link_gb_s: float


# Sources: the makers' product pages; DDR at its rated transfer rate. The Zen 4 processors execute 64-byte instructions
# in two halves, Zen 5 at once.
DESKTOP_2020 = Computer("AMD Ryzen 5 5600X", 6, 4.2, 32, False, 32, 51.2, 3.5)
DESKTOP_2022 = Computer("Intel Core i5-13600K (6 performance cores counted)", 6, 5.0, 32, True, 32, 89.6, 7.0)
LARGE_DESKTOP_2022 = Computer("AMD Ryzen 9 7950X", 16, 4.8, 32, True, 64, 83.2, 7.0)
AMD_DESKTOP_2022 = Computer("AMD Ryzen 5 7600", 6, 4.8, 32, True, 32, 83.2, 7.0)
DESKTOP_2025 = Computer("AMD Ryzen 7 9700X", 8, 4.5, 64, True, 64, 89.6, 7.0)
LAPTOP_2021 = Computer("AMD Ryzen 7 5800H", 8, 3.8, 32, False, 16, 51.2, 3.5)
LAPTOP_2023 = Computer("Intel Core i7-13700H (6 performance cores counted)", 6, 3.6, 32, True, 32, 83.2, 3.5)
LAPTOP_2025 = Computer("Intel Core Ultra 9 275HX (8 performance cores counted)", 8, 4.6, 32, True, 32, 89.6, 7.0)
# Name; memory in GiB and GB/s; fp32 TFLOPS at the (largest) boost clock; the link's GB/s, at 1.97 per PCIe 4.0 lane.
# Laptops' processors give their GPUs eight lanes. RX 7000's second fp32 instruction per cycle is not counted,
# since the shares of peak speed in reference.py come from GPUs without one.
Gpu = tuple[str, int, float, float, float]
GPUS: tuple[tuple[Computer, tuple[Gpu, ...]], ...] = (
    (
        LAPTOP_2023,
        (
            ("RTX 4060 Laptop", 8, 256, 14.6, 15.8),
            ("RTX 4050 Laptop", 6, 192, 12.1, 15.8),
            ("RTX 4070 Laptop", 8, 256, 20.0, 15.8),
            ("RTX 4080 Laptop", 12, 432, 33.9, 15.8),
            ("RTX 4090 Laptop", 16, 576, 39.7, 15.8),
        ),
    ),
    (
        DESKTOP_2020,
        (
            ("RTX 3060", 12, 360, 12.7, 31.5),
            ("RTX 3050", 8, 224, 9.1, 15.8),
            ("RTX 3060 Ti", 8, 448, 16.2, 31.5),
            ("RTX 3070", 8, 448, 20.3, 31.5),
            ("RTX 3070 Ti", 8, 608, 21.7, 31.5),
            ("RTX 3080", 10, 760, 29.8, 31.5),
            ("RTX 3080", 12, 912, 30.6, 31.5),
            ("RTX 3080 Ti", 12, 912, 34.1, 31.5),
            ("RTX 3090", 24, 936, 35.6, 31.5),
            ("RTX 3090 Ti", 24, 1008, 40.0, 31.5),
        ),
    ),
    (
        DESKTOP_2022,
        (
            ("RTX 4070", 12, 504, 29.1, 31.5),
            ("RTX 4060", 8, 272, 15.1, 15.8),
            ("RTX 4060 Ti", 8, 288, 22.1, 15.8),
            ("RTX 4060 Ti", 16, 288, 22.1, 15.8),
            ("RTX 4070 SUPER", 12, 504, 35.5, 31.5),
            ("RTX 4070 Ti", 12, 504, 40.1, 31.5),
            ("RTX 4070 Ti SUPER", 16, 672, 44.1, 31.5),
            ("RTX 4080", 16, 717, 48.7, 31.5),
            ("RTX 4080 SUPER", 16, 736, 52.2, 31.5),
        ),
    ),
    (LARGE_DESKTOP_2022, (("RTX 4090", 24, 1008, 82.6, 31.5),)),
    (
        DESKTOP_2025,
        (
            ("RTX 5050", 8, 320, 13.2, 31.5),
            ("RTX 5060", 8, 448, 19.2, 31.5),
            ("RTX 5060 Ti", 8, 448, 23.7, 31.5),
            ("RTX 5060 Ti", 16, 448, 23.7, 31.5),
            ("RTX 5070", 12, 672, 30.9, 63.0),
            ("RTX 5070 Ti", 16, 896, 43.9, 63.0),
            ("RTX 5080", 16, 960, 56.3, 63.0),
            ("RTX 5090", 32, 1792, 104.8, 63.0),
        ),
    ),
    (
        LAPTOP_2021,
        (
            ("RTX 3050 Laptop", 4, 192, 7.1, 15.8),
            ("RTX 3060 Laptop", 6, 336, 13.1, 15.8),
            ("RTX 3070 Laptop", 8, 448, 16.6, 15.8),
            ("RTX 3070 Ti Laptop", 8, 448, 17.5, 15.8),
            ("RTX 3080 Laptop", 8, 448, 21.0, 15.8),
            ("RTX 3080 Laptop", 16, 448, 21.0, 15.8),
            ("RTX 3080 Ti Laptop", 16, 512, 23.6, 15.8),
        ),
    ),
    (
        LAPTOP_2025,
        (
            ("RTX 5050 Laptop", 8, 384, 13.6, 31.5),
            ("RTX 5060 Laptop", 8, 384, 16.6, 31.5),
            ("RTX 5070 Laptop", 8, 384, 21.6, 31.5),
            ("RTX 5070 Ti Laptop", 12, 672, 26.1, 31.5),
            ("RTX 5080 Laptop", 16, 896, 35.1, 31.5),
            ("RTX 5090 Laptop", 24, 896, 45.3, 31.5),
        ),
    ),
    (
        AMD_DESKTOP_2022,
        (
            ("RX 7600", 8, 288, 10.9, 15.8),
            ("RX 7600 XT", 16, 288, 11.3, 15.8),
            ("RX 7700 XT", 12, 432, 17.6, 31.5),
            ("RX 7800 XT", 16, 624, 18.7, 31.5),
            ("RX 7900 GRE", 16, 576, 23.0, 31.5),
            ("RX 7900 XT", 20, 800, 25.7, 31.5),
            ("RX 7900 XTX", 24, 960, 30.7, 31.5),
        ),
    ),
)


def data_sheets() -> tuple[DataSheet, ...]:
    """Return the data sheets of all shipped machines, grouped by series of GPUs."""
    return tuple(_sheets())


def _sheets() -> Iterator[DataSheet]:
    for computer, gpus in GPUS:
        for title, vram_gib, vram_gb_s, fp32_tflops, link_gb_s in gpus:
            name = f"{title} {vram_gib}gb".lower().replace(" ", "-")
            brand = "NVIDIA GeForce" if title.startswith("RTX") else "AMD Radeon"
            model = f"{brand} {title}{' GPU' if title.endswith('Laptop') else ''}"
            fields = asdict(computer) | {"name": name, "gpu_model": model, "vram_gib": vram_gib, "vram_gb_s": vram_gb_s}
            yield DataSheet(**fields, fp32_tflops=fp32_tflops, link_gb_s=link_gb_s)

"""Facts about a machine: reported by its operating system, measured, or derived from data sheets."""

"""Facts about a machine: reported by its system, measured, or derived from data sheets."""

"""What is known of a machine: asked of its system, measured, or derived from data sheets."""

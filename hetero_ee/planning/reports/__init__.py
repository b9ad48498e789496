"""Reports on plans: explanations, reasons, alternatives and the options that reproduce a plan."""

"""torch's own generic exam for process-group backends, run on Gloo and on phalanx."""

"""INT8: from calibration data and a workbench of a format to the quantized artifact that earns its place."""

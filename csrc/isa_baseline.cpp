#define RADAR_ISA_NAME baseline
#define RADAR_VECTOR_BYTES 16
#include "isa.h"

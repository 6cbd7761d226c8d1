//! The two-sided 95 % quantile of Student's t distribution, which all confidence intervals use.

use std::f64::consts::{FRAC_2_PI, PI};

/// Standard normal quantile at 0.975.
const Z: f64 = 1.959_963_984_540_054;

/// Above this number of degrees, the expansion in 1/degrees is exact to the last digit; below it, the finite sum is
/// cheap.
const SUM_DEGREES_MAX: u64 = 2_000;

/// Returns the t with 95 % of the distribution between -t and t, with a relative error of at most 1e-12.
///
/// `degrees` is at least 1. For 0 degrees there is no distribution, and the result is NaN.
#[must_use]
pub fn t_quantile_95(degrees: u64) -> f64 {
    match degrees {
        0 => f64::NAN,
        1 => (PI * 0.475).tan(),
        2 => 0.95 * (2.0_f64 / (4.0 * 0.975 * 0.025)).sqrt(),
        _ if degrees > SUM_DEGREES_MAX => expansion(degrees as f64),
        _ => {
            let mut t = expansion(degrees as f64);
            let density_at_zero = density_constant(degrees);
            for _ in 0..60 {
                let error = central_mass(t, degrees) - 0.95;
                let nu = degrees as f64;
                let density = density_at_zero * (1.0 + t * t / nu).powf(-(nu + 1.0) / 2.0);
                let step = error / (2.0 * density);
                t -= step;
                if step.abs() < 1e-15 * t {
                    break;
                }
            }
            t
        }
    }
}

/// Cornish-Fisher: the quantile as a series in 1/degrees around the normal one.
fn expansion(nu: f64) -> f64 {
    let z2 = Z * Z;
    let g1 = Z * (z2 + 1.0) / 4.0;
    let g2 = Z * ((5.0 * z2 + 16.0) * z2 + 3.0) / 96.0;
    let g3 = Z * (((3.0 * z2 + 19.0) * z2 + 17.0) * z2 - 15.0) / 384.0;
    let g4 = Z * ((((79.0 * z2 + 776.0) * z2 + 1482.0) * z2 - 1920.0) * z2 - 945.0) / 92_160.0;
    Z + (g1 + (g2 + (g3 + g4 / nu) / nu) / nu) / nu
}

/// The probability between -t and t: the finite trigonometric sum for integer degrees, all of whose terms are positive.
fn central_mass(t: f64, degrees: u64) -> f64 {
    let theta = (t / (degrees as f64).sqrt()).atan();
    let (sine, cosine) = theta.sin_cos();
    let square = cosine * cosine;
    let odd = degrees % 2 == 1;
    let mut term = if odd { cosine } else { 1.0 };
    let mut sum = 0.0;
    let mut k = if odd { 1 } else { 0 };
    while k + 2 <= degrees {
        sum += term;
        // The next term: cos² (k+1)/(k+2).
        term *= square * ((k + 1) as f64) / ((k + 2) as f64);
        k += 2;
    }
    if odd { FRAC_2_PI * (theta + sine * sum) } else { sine * sum }
}

/// Γ((ν+1)/2) / (√(νπ) Γ(ν/2)), by its recurrence in steps of two.
fn density_constant(degrees: u64) -> f64 {
    let mut nu = if degrees % 2 == 1 { 1 } else { 2 };
    let mut ratio = if nu == 1 { 1.0 / PI.sqrt() } else { PI.sqrt() / 2.0 };
    while nu < degrees {
        ratio *= (nu + 1) as f64 / nu as f64;
        nu += 2;
    }
    ratio / (degrees as f64 * PI).sqrt()
}

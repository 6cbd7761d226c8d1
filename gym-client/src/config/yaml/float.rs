//! Formats floats as Python and YAML do.

/// Formats a float as Python's `repr`: shortest digits, with an exponent from 1e16 and below 1e-4.
pub(crate) fn python_float(float: f64) -> String {
    if float.is_nan() {
        return "nan".to_owned();
    }
    if float.is_infinite() {
        return if float > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let magnitude = float.abs();
    if magnitude != 0.0 && !(1e-4..1e16).contains(&magnitude) {
        let text = format!("{float:e}");
        let (mantissa, exponent) = text.split_once('e').expect("the e format has an e");
        let exponent: i32 = exponent.parse().expect("the e format ends in an integer");
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{mantissa}e{sign}{:02}", exponent.abs());
    }
    format!("{float:?}")
}

/// Formats a float in the only form that every YAML 1.1 loader reads as a float: with a point and a signed exponent.
pub(crate) fn yaml_float(float: f64) -> String {
    if float.is_nan() {
        return ".nan".to_owned();
    }
    if float.is_infinite() {
        return if float > 0.0 { ".inf" } else { "-.inf" }.to_owned();
    }
    let text = python_float(float);
    match text.split_once('e') {
        Some((mantissa, exponent)) if !mantissa.contains('.') => format!("{mantissa}.0e{exponent}"),
        _ => text,
    }
}
